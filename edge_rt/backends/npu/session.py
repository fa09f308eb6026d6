"""One tensor model on one NPU, with the CPU behind it.

A request that the NPU fails is computed by onnxruntime from the same file, unless npu.require says that it must not be.
The breaker then keeps requests off the NPU; once its pause is over, the next request lets a thread open the model
anew beside it, try it, and hand it over. No request waits for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES, DeviceCounts, NpuOptions, TensorSession
from edge_rt.backends.npu.rows import random_feeds, run_in_parts, zero_indices
from edge_rt.backends.npu.vendor import Telemetry, VendorSession
from edge_rt.backends.tensor_feeds import FeedCheck, check_outputs, shown
from edge_rt.breaker import Breaker, Ticket
from edge_rt.errors import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendError,
    BackendStepError,
    EdgeRtError,
    InvalidRequestError,
)
from edge_rt.tensor_types import TensorModelInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuEvent:
    """What happened to a model's NPU, once for each time: lost with the reason, or back after lost_s."""

    kind: str
    backend: str
    model: str
    reason: str = ""
    answers: str = ""
    lost_s: float = 0.0

    def __str__(self) -> str:
        if self.kind == "back":
            return f"event=npu_back backend={self.backend} model={self.model} lost_s={self.lost_s:.1f}"
        told = f"event=npu_{self.kind} backend={self.backend} model={self.model} answers={self.answers}"
        return f"{told} reason={self.reason!r}"


class NpuSession:
    """A TensorSession on an NPU.

    open_npu  opens the model there; open_cpu on the CPU, None where its file cannot run there
    opened    what open_npu has given already; None, with lost: why it could not
    info      with the placement there, or on the CPU where it is lost from the beginning; it changes with that
    placed    describes the model anew: as it was opened there, or on the CPU for a reason
    start     runs the opening beside the requests: a thread
    has_returned  says of a lost device, at each request, whether it has come back since the last: no pause is kept then
    """

    def __init__(
        self,
        info: TensorModelInfo,
        options: NpuOptions,
        open_npu: Callable[[], VendorSession],
        open_cpu: Callable[[], TensorSession] | None,
        *,
        opened: VendorSession | None,
        lost: EdgeRtError | None = None,
        rows: int = 0,
        placed: Callable[[VendorSession | EdgeRtError], TensorModelInfo] | None = None,
        release: Callable[[], None] = lambda: None,
        has_returned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
        tell: Callable[[NpuEvent], None] | None = None,
    ) -> None:
        self.info = info
        self.inputs, self.outputs = info.inputs, info.outputs
        self._counts = DeviceCounts()
        self._require = options.require
        self._open_npu, self._open_cpu, self._release = open_npu, open_cpu, release
        self._placed, self._has_returned = placed, has_returned
        self._rows = rows
        self._clock, self._start, self._tell = clock, start or _in_thread, tell or self._log
        self._check_feeds = FeedCheck(info.inputs)
        self._all_outputs = check_outputs(info.outputs, ())
        self._breaker = Breaker(max_failures=1, retry_s=options.retry_s)
        self._lock = threading.Lock()  # of what the opening thread shares
        self._npu: VendorSession | None = opened
        self._ready: VendorSession | None = None  # opened beside, to be taken by the next run
        self._cpu: TensorSession | None = None
        self._is_closed = False
        self._lost_at_s = 0.0
        self._reason = ""
        self._computed_on = ""
        if opened is None:
            self._lose(lost or AcceleratorLostError(backend=info.backend, reason="it was not opened"))

    @property
    def computed_on(self) -> str:
        """The place that computed the last run."""
        return self._computed_on

    def device_counts(self) -> DeviceCounts:
        return self._counts

    def state(self) -> str:
        """Give the breaker's: closed, open or half_open."""
        return self._breaker.state(self._clock())

    @property
    def host_pid(self) -> int | None:
        """The process that drives the NPU, for those who watch or end it; None where there is none."""
        pid: int | None = getattr(self._npu, "pid", None)
        return pid

    def telemetry(self) -> Telemetry:
        return self._npu.telemetry() if self._npu is not None else Telemetry()

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        if self._is_closed:
            raise BackendStepError(reason="the session is closed")
        self._check_feeds(feeds)
        wanted = check_outputs(self.outputs, outputs) if outputs else self._all_outputs
        self._take_ready()
        if self._npu is None:
            self._try_again()
            self._take_ready()  # where it was opened at once
        failure: BackendError | None = None
        if self._npu is not None:
            try:
                answers = self._compute(self._npu, feeds, wanted)
            except (AcceleratorLostError, AcceleratorMemoryError, BackendStepError) as exc:
                failure = exc
            else:
                self._count(n_products=1)
                self._computed_on = f"{self.info.backend}:{self.info.device}"
                return answers
        return self._without_npu(feeds, wanted, failure)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            sessions = (self._npu, self._ready, self._cpu)
            self._npu = self._ready = self._cpu = None
        for session in sessions:
            if session is not None:
                session.close()
        self._release()

    def _compute(
        self, npu: VendorSession, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        def run(some: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
            return self._checked(npu.run(some, names), names)

        return run_in_parts(run, feeds, self._rows, self.outputs, wanted) if self._rows else run(feeds, wanted)

    def _checked(self, given: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Give what was asked for of an NPU's answers. Raises AcceleratorLostError for what the model cannot give."""
        for spec in self.outputs:
            if spec.name not in wanted:
                continue
            if (array := given.get(spec.name)) is None:
                raise AcceleratorLostError(backend=self.info.backend, reason=f"it gives no {spec.name}")
            shape = (self._rows, *spec.shape[1:]) if self._rows else spec.shape
            fits = array.ndim == len(shape) and all(n in (-1, have) for n, have in zip(shape, array.shape, strict=True))
            if array.dtype != DTYPES[spec.datatype] or not fits:
                told = f"{array.dtype} and {shown(array.shape)}, the model's of {spec.datatype} and {shown(shape)}"
                raise AcceleratorLostError(backend=self.info.backend, reason=f"its {spec.name} is of {told}")
        return {name: given[name] for name in wanted}

    def _without_npu(
        self, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str], failure: BackendError | None
    ) -> dict[str, NDArray[Any]]:
        """Let the CPU answer what the NPU failed, or say that it may not."""
        if self._require == "npu" or self._open_cpu is None:
            raise self._unanswered(failure)
        is_lost = failure is not None and not isinstance(failure, BackendStepError)
        if is_lost:
            assert failure is not None
            self._lose(failure)
        try:
            cpu = self._cpu = self._cpu or self._open_cpu()
        except EdgeRtError as exc:  # not every model that an NPU takes runs there
            raise self._unanswered(None if is_lost else failure, f"the CPU cannot take its place: {exc}") from exc
        try:
            answers = cpu.run(feeds, wanted)
        except InvalidRequestError:
            raise  # it was the request's fault, and says nothing of the NPU
        except BackendStepError:
            if failure is not None and not is_lost:
                self._lose(failure)
            raise
        if failure is not None and not is_lost:
            self._lose(failure)
        self._count(n_fallbacks=1)
        self._computed_on = f"{cpu.info.backend}:{cpu.info.device}"
        return answers

    def _unanswered(self, failure: BackendError | None, why: str = "") -> BackendError:
        """Give the error of a request that the NPU has failed, and nobody else answers.

        A run that the stack fails may be the request's fault, and other requests must not pay for that.
        """
        if failure is None:
            reason = "; ".join(filter(None, (self._reason, why)))
            return AcceleratorLostError(backend=self.info.backend, reason=reason)
        if not (isinstance(failure, BackendStepError) and self._is_sound()):
            self._lose(failure)
        return failure

    def _is_sound(self) -> bool:
        """Say whether the NPU computes what is not a client's."""
        assert self._npu is not None
        try:
            self._try(self._npu)
        except BackendError:
            return False
        return True

    def _try(self, npu: VendorSession) -> None:
        names = [spec.name for spec in self.outputs]
        self._checked(npu.run(zero_indices(random_feeds(npu.inputs, 1)), names), names)

    def _lose(self, error: EdgeRtError) -> None:
        """Put the NPU aside, and tell it once."""
        now_s = self._clock()
        npu, self._npu = self._npu, None
        if npu is not None:
            npu.close()
        self._has_returned()  # takes note that it is away
        with self._lock:
            self._breaker.trip(now_s)
        self._lost_at_s, self._reason = now_s, str(getattr(error, "reason", error))
        self._describe(error)
        self._count(n_faults=1)
        answers = "none" if self._require == "npu" or self._open_cpu is None else "cpu"
        self._tell(
            NpuEvent(
                kind="lost", backend=self.info.backend, model=self.info.model, reason=self._reason, answers=answers
            )
        )

    def _try_again(self) -> None:
        now_s = self._clock()
        has_returned = self._has_returned()
        with self._lock:
            if has_returned:
                self._breaker.retry_now(now_s)
            if not self._breaker.allows(now_s):
                return
            ticket = self._breaker.begin(now_s)
        self._start(lambda: self._reopen(ticket))

    def _reopen(self, ticket: Ticket) -> None:
        """Open the model on the NPU and try it; on a thread beside."""
        session: VendorSession | None = None
        try:
            session = self._open_npu()
            self._try(session)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is tried again and nobody waits for it
            if session is not None:
                session.close()
            with self._lock:
                self._breaker.failed(ticket, self._clock())
                self._reason = str(getattr(exc, "reason", exc))
            return
        with self._lock:
            if not self._is_closed:
                self._ready = session
                self._breaker.succeeded(ticket)
                return
        session.close()

    def _take_ready(self) -> None:
        """Go on with what was opened beside; the CPU's copy of the model gives its memory back."""
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is None:
            return
        self._npu = ready
        self._describe(ready)
        cpu, self._cpu = self._cpu, None
        if cpu is not None:
            cpu.close()
        lost_s = self._clock() - self._lost_at_s
        self._tell(NpuEvent(kind="back", backend=self.info.backend, model=self.info.model, lost_s=lost_s))

    def _describe(self, placed: VendorSession | EdgeRtError) -> None:
        """Let info tell where the model is now; what others have put there stays."""
        if self._placed is not None:
            now = self._placed(placed)
            self.info = replace(self.info, device=now.device, placement=now.placement, evidence=now.evidence)

    def _count(self, *, n_products: int = 0, n_faults: int = 0, n_fallbacks: int = 0) -> None:
        now = self._counts
        self._counts = DeviceCounts(
            n_products=now.n_products + n_products,
            n_faults=now.n_faults + n_faults,
            n_fallbacks=now.n_fallbacks + n_fallbacks,
            last_fault=self._reason,
        )

    def _log(self, event: NpuEvent) -> None:
        is_warning = event.kind != "back" and self._require != "any"
        _log.log(logging.WARNING if is_warning else logging.INFO, "%s", event)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="npu-reopen", daemon=True).start()
