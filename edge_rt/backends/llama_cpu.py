"""llama.cpp on the CPU, through llama-cpp-python's low-level API.

The packaged high-level class and server serialise requests, so only the C functions are used here. One thread
owns a session: llama.cpp contexts are not thread safe.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import (
    Absent,
    Device,
    LoadOptions,
    MemoryNeed,
    ModelFile,
    SeqRows,
    model_info,
)
from edge_rt.backends.interrupt import interrupt_held
from edge_rt.backends.llama_context import KV_TYPES, LlamaContext
from edge_rt.backends.llama_library import LlamaVocab, Log, load_library, system_info, version
from edge_rt.catalog.gguf import GgufHeader
from edge_rt.catalog.lora import check_adapter, check_numbers
from edge_rt.devices import cpu, memory
from edge_rt.devices.base import Reading
from edge_rt.errors import BackendLoadError, BackendStepError, BackendUnavailableError
from edge_rt.types import Adapter, AdapterFile, Capabilities

_STATE_MAGIC = b"ERTS"


class LlamaCpuBackend:
    """Loads GGUF models on the CPU with llama.cpp."""

    name: ClassVar[str] = "llama_cpu"

    def probe(self) -> tuple[Device, ...] | Absent:
        try:
            load_library()
        except BackendUnavailableError as exc:
            return Absent(reason=exc.reason, extra=exc.extra)
        flags = [f.split("=")[0].strip() for f in system_info().split("|") if f.strip().endswith("= 1")]
        built = " ".join(f.removeprefix("CPU :").strip() for f in flags)
        return (Device(id="cpu", kind="cpu", detail=f"llama.cpp from llama-cpp-python {version()}, built for {built}"),)

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:
        """Rule out only what ggml aborts on: which architectures it knows, llama.cpp tells when it loads one."""
        _ = file.header
        if options.n_ctx < options.n_seq_max:
            return f"a context of {options.n_ctx} tokens is too small for {options.n_seq_max} sequences; raise n_ctx"
        return None

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        """Estimate from the headers alone.

        Weights count once: where llama.cpp repacks them for this CPU the copy takes memory, but the pages of the mapped
        file are clean then and can be dropped.
        """
        need = _estimate(file.header, options)
        # Without the hash of the whole model, which the load compares.
        adapters = [replace(adapter, base_sha256="") for adapter in options.adapters]
        n_bytes = sum(check_adapter(adapter, file.header, file.path) for adapter in adapters)
        return replace(need, weights_bytes=need.weights_bytes + n_bytes)

    def load(self, file: ModelFile, options: LoadOptions) -> LlamaCpuSession:
        session: LlamaCpuSession | None = None
        try:
            with interrupt_held() as is_interrupted:
                session = open_session(file, options, is_interrupted=is_interrupted)
        except KeyboardInterrupt:
            if session is not None:
                session.close()
            raise
        return session


def open_session(
    file: ModelFile,
    options: LoadOptions,
    *,
    is_interrupted: Callable[[], bool],
    available: Callable[[], Reading[int]] = memory.available_bytes,
) -> LlamaCpuSession:
    """Load a model; give up with BackendLoadError once is_interrupted says so.

    available  the memory that is there, by which cells may be laid out anew: they are held twice then
    """
    if reason := LlamaCpuBackend().supports(file, options):  # llama.cpp aborts on crafted files: ours looks first
        raise BackendLoadError(model=file.model, reason=reason)
    lib, log = load_library()
    log.lines.clear()
    need, have_bytes = _estimate(file.header, options), available().value
    has_room = have_bytes is not None and have_bytes >= need.total_bytes + need.kv_bytes
    return LlamaCpuSession(lib, log, file, options, is_interrupted, has_room=has_room)


def _estimate(header: GgufHeader, options: LoadOptions) -> MemoryNeed:
    _, kv_element_bytes = KV_TYPES[options.kv_type]
    weights = sum(t.size_bytes for t in header.tensors)
    n_rows = min(options.n_batch, options.n_ubatch)
    return MemoryNeed(
        weights_bytes=weights,
        kv_bytes=int(header.kv_elements_per_token * options.n_ctx * kv_element_bytes),
        # activations of one micro-batch, attention scores, and the logits of every sequence
        scratch_bytes=n_rows * header.embedding_length * 4 * 12
        + options.n_logits_max * header.n_vocab * 4
        + 64 * 2**20,
    )


class LlamaCpuSession:
    """A llama.cpp model and context. All sequences together may have n_ctx KV cells, in the layout that is best."""

    def __init__(
        self,
        lib: Any,
        log: Log,
        file: ModelFile,
        options: LoadOptions,
        is_interrupted: Callable[[], bool],
        *,
        has_room: bool,
    ) -> None:
        self._lib, self._log = lib, log
        self._model: Any = None
        self._context: LlamaContext | None = None
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        go_on = lib.llama_progress_callback(lambda _share, _data: not is_interrupted())  # kept alive over the call
        model_params.progress_callback = go_on
        self._model = lib.llama_model_load_from_file(os.fsencode(file.path), model_params)
        if not self._model:
            raise BackendLoadError(model=file.model, reason=log.reason())
        header = file.header
        self._tokenizer = LlamaVocab(lib, self._model, header)
        n_vocab = self._tokenizer.n_vocab
        n_threads = options.n_threads or len(cpu.usable_cores())
        can_trim = not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))
        # A model of sliding windows has two caches, of which each is saved in a form of its own.
        can_part = has_room and can_trim and f"{header.arch}.attention.sliding_window" not in header.metadata
        try:
            self._context = LlamaContext(
                lib, log, self._model, options, n_threads=n_threads, n_vocab=n_vocab, can_part=can_part
            )
        except BackendStepError as exc:
            self.close()
            raise BackendLoadError(model=file.model, reason=exc.reason) from exc
        self._adapters: dict[str, Any] = {}
        for adapter in options.adapters:
            self._open_adapter(adapter, file)
        key = struct.pack("<4sQQI", _STATE_MAGIC, header.file_bytes, header.n_params, options.n_ctx)
        self._state_key = np.frombuffer(key, dtype=np.uint8)
        self.caps = Capabilities(
            n_ctx=options.n_ctx,
            n_seq_max=options.n_seq_max,
            n_vocab=n_vocab,
            n_batch=options.n_batch,
            can_trim=can_trim,
            can_copy=True,
            can_save=True,
            copies_share=True,
            adapters=tuple(self._adapters),
        )
        self.vocab = self._tokenizer.facts
        info = model_info(file, options, self.caps, backend=LlamaCpuBackend.name, n_threads=n_threads)
        self.info = replace(info, build=f"{version()} {system_info()}")

    def _open_adapter(self, adapter: AdapterFile, file: ModelFile) -> None:
        try:
            check_adapter(adapter, file.header, file.path)
            check_numbers(adapter)
            opened = self._lib.llama_adapter_lora_init(self._model, os.fsencode(adapter.path))
            if not opened:
                raise BackendLoadError(model=file.model, reason=f"adapter {adapter.name}: {self._log.reason()}")
        except BaseException:
            self.close()
            raise
        self._adapters[adapter.name] = opened

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        self._open.set_adapters([(self._adapters[adapter.name], adapter.scale) for adapter in adapters])

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        return self._tokenizer.tokenize(text, special=special, add_bos=add_bos)

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        return self._tokenizer.piece(token_id, special=special)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        return self._open.decode(batch)

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        self._open.seq_copy(src, dst, n_tokens)

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        self._open.seq_trim(seq_id, n_tokens)

    def seq_length(self, seq_id: int) -> int:
        return self._open.seq_length(seq_id)

    def seq_bytes(self, seq_id: int) -> int:
        return len(self._state_key) + self._open.seq_bytes(seq_id)

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        if start != 0 or end not in (None, self.seq_length(seq_id)):
            raise BackendStepError(reason="llama.cpp saves whole sequences only")
        state = self._open.seq_save(seq_id, len(self._state_key))
        state[: len(self._state_key)] = self._state_key
        return state

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        n_head = len(self._state_key)
        if not np.array_equal(state[:n_head], self._state_key):
            raise BackendStepError(reason="the saved sequence belongs to another model or context size")
        self._open.seq_load(seq_id, state, n_head)

    def set_threads(self, n_threads: int) -> None:
        self._open.set_threads(n_threads)

    @property
    def is_in_parts(self) -> bool:
        """Whether each sequence has cells of its own now; else all share one pool."""
        return self._open.is_in_parts

    @property
    def _open(self) -> LlamaContext:
        if self._context is None or not self._context.is_open:
            raise BackendStepError(reason="the session is closed")
        return self._context

    def close(self) -> None:
        if self._context is not None:
            self._tokenizer.close()
            self._context.close()
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = self._context = None
