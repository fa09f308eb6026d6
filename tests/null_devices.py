"""Simulated devices in virtual time behind the product's own dispatcher: scripted speed, power, faults and heat.

Each computes one request after the other, as a worker's one computing thread does. Nothing here decides anything: the
ranking, the breaker, the choice and the checks are edge_rt.scheduler's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from edge_rt import config
from edge_rt.catalog.manifest import Variant
from edge_rt.errors import BackendLoadError, BackendStepError, EdgeRtError, WorkerLostError
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.placement import Candidate, Measured, Policy, Ranking, rank
from edge_rt.scheduler.probes import Probes
from edge_rt.scheduler.residency import Residency
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import (
    DeviceState,
    MediaAnswer,
    MediaRequest,
    Reply,
    Tensor,
    TensorAnswer,
    TensorModelInfo,
    TensorRequest,
    TensorTimings,
)
from edge_rt.types import Chunk, GenerateRequest
from edge_rt.worker.channel import Inferred, Load, SentTensor
from edge_rt.worker.process import OnReply
from edge_rt.worker.supervisor import WorkerEvents

PROBE_S, READING_S = 0.5, 0.01  # what a child takes for the first reading, and for others

Window = tuple[float, float]
ALWAYS: tuple[Window, ...] = ((0.0, 1e9),)


def inside(windows: Sequence[Window], now_s: float) -> bool:
    return any(start <= now_s < end for start, end in windows)


@dataclass(eq=False)
class Device:
    """kind and service_s are what the profile knows; the rest happens.

    faults        windows of time in which requests fail, after fail_s
    hot, gone     windows in which it says that it is
    heat_c_per_j, cool_per_s  how energy warms it and how fast it nears ambient
    stand_in      what computes in its place, as its worker tells: in the windows away, or always; it takes stand_in_s
    throttle_c    above it everything takes throttle_factor as long
    jitter        standard deviation of the service time's logarithm
    """

    name: str
    kind: str
    service_s: float
    power_w: float
    load_s: float = 0.2
    faults: tuple[Window, ...] = ()
    fail_s: float | None = None
    error: Callable[[], EdgeRtError] = lambda: BackendStepError(reason="scripted")
    is_wrong: bool = False
    refuses_load: bool = False
    stand_in: str = ""
    stand_in_s: float | None = None
    away: tuple[Window, ...] = ALWAYS
    jitter: float = 0.0
    heat_c_per_j: float = 0.0
    cool_per_s: float = 0.02
    throttle_c: float = 85.0
    throttle_factor: float = 2.0
    ambient_c: float = 40.0
    temp_c: float = 40.0
    hot: tuple[Window, ...] = ()
    gone: tuple[Window, ...] = ()
    energy_j: float = 0.0
    n_runs: int = 0
    n_failed: int = 0
    _cooled_at_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def temperature_c(self, now_s: float) -> float:
        if inside(self.hot, now_s):
            return 95.0
        kept = (1 - self.cool_per_s) ** max(0.0, now_s - self._cooled_at_s)
        return self.ambient_c + (self.temp_c - self.ambient_c) * kept

    def spend(self, now_s: float, seconds: float) -> None:
        self.temp_c = self.temperature_c(now_s) + self.power_w * seconds * self.heat_c_per_j
        self._cooled_at_s = now_s
        self.energy_j += self.power_w * seconds

    def stand_in_at(self, now_s: float) -> str:
        return self.stand_in if inside(self.away, now_s) else ""

    def run_s(self, now_s: float, factor: float) -> float:
        if self.stand_in_s is not None and self.stand_in_at(now_s):
            return self.stand_in_s
        seconds = self.service_s * factor
        return seconds * (self.throttle_factor if self.temperature_c(now_s) >= self.throttle_c else 1.0)


@dataclass
class World:
    """Devices, a clock that starts at 0 with the world, and a diary of what was computed for whom."""

    devices: tuple[Device, ...]
    seed: int = 0
    policy: str = "balanced"
    is_profiled: bool = True
    forms: tuple[str, ...] = ("v",)
    ran: list[tuple[str, str]] = field(default_factory=list)  # (request, device) of every answer given
    replies: list[Reply | None] = field(default_factory=list)  # that workers were let write
    is_probed_late: bool = False  # temperatures are as old as the product's probes let them be
    was_probed: bool = False
    n_loaded: int = 0
    most_loaded: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.probes = Probes(probe=self._probe, max_device_c=85.0, cool_by_c=5.0)
        self.origin_s = asyncio.get_running_loop().time()

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.origin_s

    def factor(self, device: Device, request: TensorRequest) -> float:
        """Say how much longer than usual a request takes on a device."""
        return self.rng.lognormvariate(0.0, device.jitter) if device.jitter else 1.0

    # A dispatcher's subject.

    async def ready(self) -> None:
        await self.probes.ensure(["sim"])

    async def _probe(self, backend: str) -> tuple[DeviceState, ...]:
        await asyncio.sleep(READING_S if self.was_probed else PROBE_S)
        self.was_probed = True
        return self._states()

    def _states(self) -> tuple[DeviceState, ...]:
        return tuple(
            DeviceState(
                backend="sim",
                id=d.name,
                kind=d.kind,
                evidence="stub",
                temp_c=d.temperature_c(self.now_s()),
                fault="scripted: gone" if inside(d.gone, self.now_s()) else "",
            )
            for d in self.devices
        )

    def rank(self, shown_s: Callable[[Candidate], float | None]) -> Ranking:
        def measured(candidate: Candidate) -> Measured | None:
            device, shown = self.device(candidate.device), shown_s(candidate)
            if not self.is_profiled:
                return Measured(latency_s=shown, is_profiled=False) if shown is not None else None
            latency_s = shown if shown is not None else device.service_s
            return Measured(latency_s=latency_s, energy_j=device.service_s * device.power_w, memory_bytes=1)

        states = self.probes.states(["sim"]) if self.is_probed_late else self._states()
        forms = tuple(Variant(id=name, quant="INT8", file=f"{name}.sim", backends=("sim",)) for name in self.forms)
        policy = Policy(name=self.policy)  # type: ignore[arg-type]
        return rank("m", forms, states, policy, pulled=set(self.forms), measured=measured)

    def load(self, candidate: Candidate, *, force: bool) -> Load:
        return Load(model="m", variant="v", path="", quant="", backend="sim", n_ctx=0, device=candidate.device)

    def placed_by(self, settings: config.Placement) -> World:
        self.policy = settings.policy
        return self

    def pinned(self, variant: str) -> World:
        return replace(self, forms=(variant,))

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)

    def make_worker(self, load: Load, events: WorkerEvents) -> Worker:
        return Worker(self, self.device(load.device))

    def dispatcher(self, telemetry: Telemetry | None = None, *, max_loaded: int = 4, **settings: object) -> Dispatcher:
        telemetry = telemetry or Telemetry()
        flags = {f"placement.{name}": value for name, value in settings.items()}
        loaded = config.load(environ={}, flags=flags).config
        residency = Residency(max_loaded=max_loaded, events=telemetry)
        dispatcher = Dispatcher(loaded.placement, residency, telemetry, self.make_worker)
        dispatcher.add("m", self, keep_alive_s=-1.0)
        self.probes.listen(dispatcher.replan)
        return dispatcher


class TextlessWorker:
    """A worker that is asked for no text."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        raise NotImplementedError

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        raise NotImplementedError

    async def detokenize(self, token_ids: list[int]) -> str:
        raise NotImplementedError


class Worker(TextlessWorker):
    """A worker process of one device; its answers are the request's first input, or not."""

    pid = 1

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._streams: dict[str, int] = {}

    async def start(self) -> TensorModelInfo:
        if self._device.refuses_load:
            raise BackendLoadError(model="m", reason="scripted")
        self._world.n_loaded += 1
        self._world.most_loaded = max(self._world.most_loaded, self._world.n_loaded)
        await asyncio.sleep(self._device.load_s)
        return TensorModelInfo(
            model="m",
            variant="v",
            backend="sim",
            device=self._device.name,
            quant="INT8",
            size_bytes=1,
            inputs=(),
            outputs=(),
            n_threads=1,
        )

    async def stop(self, error: Callable[[], EdgeRtError]) -> None:
        self._world.n_loaded -= 1

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        world, device = self._world, self._device
        came_at_s = world.now_s()
        async with device.lock:
            begun_at_s = world.now_s()
            seconds = device.run_s(begun_at_s, world.factor(device, request))
            device.n_runs += 1
            if fails := inside(device.faults, begun_at_s):
                seconds = device.fail_s if device.fail_s is not None else seconds
            await asyncio.sleep(seconds)
            device.spend(world.now_s(), seconds)
            if fails:
                device.n_failed += 1
                raise device.error()
        stand_in, data = device.stand_in_at(begun_at_s), request.inputs[0].data
        if device.is_wrong and not stand_in:
            data = bytes(255 - byte for byte in data)
        if request.stream:
            count = self._streams[request.stream] = self._streams.get(request.stream, 0) + 1
            data += bytes([count])
        world.ran.append((request.id, device.name))
        timings = TensorTimings(queue_s=begun_at_s - came_at_s, compute_s=seconds, batch_size=1)
        region = request.regions.get("y")  # then the answer tells where it is, not what
        output = Tensor(name="y", datatype="UINT8", shape=(len(data),), data=b"" if region else data, region=region)
        return TensorAnswer(outputs=(output,), timings=timings, place=stand_in)

    def infer_now(self, request: TensorRequest, on_reply: OnReply) -> Callable[[], None]:
        self._world.replies.append(request.reply)
        asked = asyncio.get_running_loop().create_task(self.infer(request))

        def ended(done: asyncio.Task[TensorAnswer]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                assert isinstance(error, EdgeRtError)
                on_reply(error)
                return
            answer = done.result()
            outputs = tuple(map(SentTensor.of, answer.outputs))
            reply = Inferred("1", outputs, timings=answer.timings, substitute=answer.place)
            reply.attached = b"".join(output.data for output in answer.outputs)
            on_reply(reply)

        asked.add_done_callback(ended)
        return asked.cancel

    def late_s(self) -> float:
        return 0.0

    async def look(self, request: MediaRequest) -> MediaAnswer:
        raise NotImplementedError


def lost() -> EdgeRtError:
    return WorkerLostError(model="m", reason="scripted")


def request(number: int, *, stream: str = "", is_last: bool = False, variant: str = "") -> TensorRequest:
    data = number.to_bytes(4, "little")
    tensor = Tensor(name="x", datatype="UINT8", shape=(4,), data=data)
    return TensorRequest(id=f"r{number}", model="m", inputs=(tensor,), stream=stream, is_last=is_last, variant=variant)
