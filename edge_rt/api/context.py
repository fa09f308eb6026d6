"""What every endpoint works with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from edge_rt.api.kserve_wire import RegionPart
from edge_rt.api.regions import Regions
from edge_rt.cache.store import Store
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest
from edge_rt.config import Config
from edge_rt.errors import ModelNotFoundError, OverloadedError, UnsupportedFeatureError
from edge_rt.router.decide import Decision
from edge_rt.scheduler.direct import OnEnd
from edge_rt.scheduler.placed_model import DispatchStatus
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorModelInfo, TensorRegion, TensorRequest
from edge_rt.types import Chunk, GenerateRequest, ModelInfo, PinAction, PinnedPrefix


class ModelStatus(Protocol):
    """One model of the catalog; info or tensor is there while it is loaded. See runtime.ModelStatus."""

    @property
    def id(self) -> str: ...
    @property
    def pulled(self) -> bool: ...
    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def tensor(self) -> TensorModelInfo | None: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def variant(self) -> str: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def idle_s(self) -> float | None: ...
    @property
    def keep_alive_s(self) -> float: ...
    @property
    def path(self) -> str | None: ...
    @property
    def error(self) -> str: ...
    @property
    def versions(self) -> tuple[str, ...]: ...


class RuntimeProtocol(Protocol):
    """What the API asks of runtime.Runtime; tests pass a fake."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Answer in chunks. Closing the generator stops the engine within one token."""
        ...

    def explain(self, request: GenerateRequest) -> Decision:
        """Tell where a request would be answered, and why."""
        ...

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Raises InvalidRequestError for an answer that is not remembered."""
        ...

    async def infer(self, request: TensorRequest) -> TensorAnswer: ...

    def infer_now(
        self, request: TensorRequest, on_end: OnEnd, *, is_checked: bool = False
    ) -> Callable[[], None] | None:
        """Infer without a task; see runtime.Runtime.infer_now."""
        ...

    async def look(self, request: MediaRequest) -> MediaAnswer: ...

    def tasks(self) -> Mapping[str, str]:
        """What each model and chain that takes files does with them, by id."""
        ...

    def chains(self) -> Sequence[Chain]: ...

    async def load(self, model: str, *, tensors: bool = False, variant: str = "") -> None: ...

    async def unload(self, model: str) -> None: ...

    def keep(self, model: str, keep_alive_s: float) -> None:
        """Keep a model that is in memory for another idle time, until it leaves; negative: for ever."""
        ...

    async def tokenize(self, model: str, text: str, *, special: bool, add_bos: bool) -> list[int]: ...

    async def count_prompt(self, request: GenerateRequest) -> int:
        """Count the tokens of a request's prompt."""
        ...

    async def detokenize(self, model: str, token_ids: list[int]) -> str: ...

    async def pins(
        self, model: str, tenant: str, *, action: PinAction = "list", name: str = "", text: str = ""
    ) -> list[PinnedPrefix]: ...

    async def placement(self, model: str) -> DispatchStatus: ...

    def models(self) -> Sequence[ModelStatus]: ...

    def model(self, model_id: str, variant: str = "", /) -> ModelStatus:
        """Describe a model, or one form of a tensor model. Raises ModelNotFoundError."""
        ...

    def ready(self) -> bool:
        """True while requests are taken: not when starting or shutting down."""
        ...


class Bodies:
    """Counts the bytes of all request bodies, from their arrival until their requests have been answered."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def take(self, n_bytes: int, max_bytes: int) -> None:
        """Raise OverloadedError where there is no room for so many more."""
        if self.n_bytes + n_bytes > max_bytes:
            raise OverloadedError(
                resource="bytes of request bodies", limit=max_bytes, setting="server.max_bodies_bytes"
            )
        self.n_bytes += n_bytes

    def give_back(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What all requests share.

    answer_store    of the answer cache; None where it is switched off
    regions         None without server.shm_socket_path
    body_timeout_s  how long a client may take to send a whole body
    """

    runtime: RuntimeProtocol
    config: Config
    telemetry: Telemetry
    answer_store: Store | None = None
    regions: Regions | None = None
    body_timeout_s: float = 30.0
    bodies: Bodies = field(default_factory=Bodies)

    def model_id(self, wanted: str | None) -> str:
        """Give the model a request names, or the default."""
        return self.config.catalog.default_model if wanted is None else wanted

    def adapters(self, model: str) -> tuple[str, ...]:
        """Name the adapters of a model: the configuration's, then its manifest's; () for one that is not known."""
        own = tuple(self.config.model(model).adapters)
        try:
            manifest = self.runtime.model(model).manifest
        except ModelNotFoundError:
            return own
        return (*own, *(a.id for a in manifest.adapters if a.id not in own)) if manifest is not None else own

    def lease(self, part: RegionPart, uid: int | None) -> AbstractContextManager[TensorRegion]:
        """Keep a part of shared memory usable in a `with`. Raises as Regions.lease does."""
        if self.regions is None:
            raise UnsupportedFeatureError(feature="shared memory", remedy="server.shm_socket_path turns it on")
        return self.regions.lease(part.region, part.offset, part.size_bytes, uid)
