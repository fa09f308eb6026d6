"""Workers whose answers say what they took.

A worker is one engine, so what several workers of one model compute at the same time is told apart here and nowhere
above: a tensor model may be on the CPU and on an NPU at once, and a copy of a request be compared with its answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import count
from typing import Final

from edge_rt.config import Worker as Settings
from edge_rt.errors import EdgeRtError
from edge_rt.power.monitor import EnergyMonitor, Measured
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorModelInfo, TensorRequest
from edge_rt.types import Chunk, Energy, GenerateRequest, ModelInfo
from edge_rt.worker.channel import Inferred, Load
from edge_rt.worker.process import OnReply
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents

_NUMBERS: Final = count(1)


Make = Callable[[Load, Settings, WorkerEvents], ModelWorker]
Told = Callable[[str, Energy], None]  # model, and what was taken


def metered(make: Make, monitor: EnergyMonitor, told: Told, aborted: Told) -> Make:
    """Give what makes workers that are metered.

    told     hears what an answer without tokens took; the others say it themselves
    aborted  hears what was spent on an answer that broke off or was cancelled
    """

    def made(load: Load, settings: Settings, events: WorkerEvents) -> ModelWorker:
        return MeteredWorker(make(load, settings, events), monitor, load.model, told, aborted)

    return made


class MeteredWorker:
    """A worker beside a meter. Everything else is the worker's own."""

    def __init__(self, worker: ModelWorker, monitor: EnergyMonitor, model: str, told: Told, aborted: Told) -> None:
        self._worker, self._monitor, self._model = worker, monitor, model
        self._told, self._aborted = told, aborted
        self._engine = f"{model}#{next(_NUMBERS)}"
        self._n_threads = 1
        self.late_s, self.stop = worker.late_s, worker.stop
        self.tokenize, self.detokenize, self.prompt_ids = worker.tokenize, worker.detokenize, worker.prompt_ids
        self.pins = worker.pins

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    async def start(self) -> ModelInfo | TensorModelInfo:
        info = await self._worker.start()
        self._n_threads = info.n_threads
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        with self._computing() as measured:
            async with aclosing(self._worker.generate(request)) as answer:
                async for chunk in answer:
                    if chunk.usage is None or chunk.timings is None:
                        yield chunk
                    else:
                        energy = measured.energy(chunk.timings)
                        measured.end()
                        yield replace(chunk, usage=replace(chunk.usage, energy=energy))

    @contextmanager
    def _computing(self) -> Iterator[Measured]:
        """Keep account of an answer until its measure ends; one that has not ended by then was aborted."""
        with self._monitor.computing(self._engine, n_threads=self._n_threads) as measured:
            try:
                yield measured
            finally:
                self._break_off(measured)

    def _break_off(self, measured: Measured) -> None:
        energy = measured.broken_off()
        measured.end()
        if energy is not None:
            self._aborted(self._model, energy)

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        with self._computing() as measured:
            answer = await self._worker.infer(request)
            energy = measured.energy(answer.timings)
            measured.end()
        if energy is None:
            return answer
        self._told(self._model, energy)
        return replace(answer, energy=energy)

    def infer_now(self, request: TensorRequest, on_reply: OnReply) -> Callable[[], None] | None:
        """Ask without a task, as the worker does; the reply has its energy, which the worker cannot write itself."""
        measured = self._monitor.computing(self._engine, n_threads=self._n_threads)

        def replied(reply: Inferred | EdgeRtError) -> None:
            if isinstance(reply, Inferred):
                reply.energy = measured.energy(reply.timings)
                if reply.energy is not None:
                    self._told(self._model, reply.energy)
                measured.end()
            else:
                self._break_off(measured)
            on_reply(reply)

        try:
            drop = self._worker.infer_now(replace(request, reply=None) if request.reply else request, replied)
        except BaseException:
            measured.end()
            raise
        if drop is None:
            measured.end()
            return None

        def dropped() -> None:
            self._break_off(measured)
            drop()

        return dropped

    async def look(self, request: MediaRequest) -> MediaAnswer:
        with self._computing() as measured:
            answer = await self._worker.look(request)
            energy = None if answer.timings is None else measured.energy(answer.timings)
            measured.end()
        if energy is None:
            return answer
        self._told(self._model, energy)
        return replace(answer, energy=energy)
