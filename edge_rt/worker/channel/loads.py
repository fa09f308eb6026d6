"""What a worker is told of the model that it loads."""

from __future__ import annotations

import msgspec

from edge_rt.catalog.pipelines import Pipeline, StateTensor
from edge_rt.tensor_types import ChipNeeds, Require
from edge_rt.types import AdapterFile


class NpuLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a model runs on an NPU; as backends.base.NpuOptions. max_artifact_bytes 0 keeps no compiled forms."""

    require: Require = "prefer"
    max_artifact_bytes: int = 2 * 2**30
    retry_s: float = 0.8
    soc: dict[str, str] = {}
    options: dict[str, dict[str, str]] = {}
    needs: ChipNeeds | None = None


class TensorLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a tensor model takes beyond a language model's settings.

    assets       paths by id
    max_shapes   shapes of dynamic inputs that may be prepared for at a time
    max_tensor_bytes, max_pixels  of one request; checked before anything of that size is allocated
    custom_op_libraries  that the model may use; () none
    backends     that can run the file, in order of preference; () leaves it to the worker
    """

    pipeline: Pipeline | None = None
    state: tuple[StateTensor, ...] = ()
    assets: dict[str, str] = {}
    max_batch: int = 1
    max_delay_s: float = 0.0
    max_shapes: int = 8
    max_streams: int = 256
    max_tensor_bytes: int = 64 * 2**20
    max_pixels: int = 50_000_000
    max_audio_s: float = 3600.0
    graph_cache: bool = True
    custom_op_libraries: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    npu: NpuLoad = NpuLoad()


class DraftLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A model that drafts for another, as Load has it. is_optional: without it the other is loaded all the same."""

    model: str
    variant: str
    path: str
    quant: str
    backend: str
    is_optional: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}:{self.variant}" if self.variant else self.model


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """Load a model; the first message a worker gets.

    path           "" for back ends without a file
    backend        its name, or "auto" for the first that supports the model
    chat_template  overrides the file's own; None leaves it
    force          load although the memory looks too small
    adapters       that a language model's requests may name
    pins           system prompts that stay, by name
    draft          the model that drafts for a language model
    tensor         set for a tensor model, None for a language model
    """

    model: str
    variant: str
    path: str
    quant: str
    backend: str
    n_ctx: int
    n_seq_max: int = 8
    n_batch: int = 512
    n_threads: int = 0
    kv_type: str = "f16"
    packed_copy: bool = True
    device: str = "cpu"
    chat_template: str | None = None
    max_stall_s: float = 0.15
    max_prefix_bytes: int = -1
    isolate_prefixes: bool = False
    max_prefix_disk_bytes: int = 0
    pins: dict[str, str] = {}
    stream_interval_s: float = 0.05
    memory_margin_bytes: int = 0
    force: bool = False
    max_draft: int = 15
    min_draft: int = 0
    min_draft_chance: float = 0.0
    draft: DraftLoad | None = None
    tensor: TensorLoad | None = None
    adapters: tuple[AdapterFile, ...] = ()
