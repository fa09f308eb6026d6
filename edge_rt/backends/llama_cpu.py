"""llama.cpp on the CPU, through llama-cpp-python's low-level API.

The packaged high-level class and server serialise requests, so only the C functions are used here. One thread
owns a session: llama.cpp contexts are not thread safe.
"""

from __future__ import annotations

import ctypes
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
    NoCellsError,
    SeqRows,
    model_info,
)
from edge_rt.backends.interrupt import interrupt_held
from edge_rt.backends.llama_library import LlamaVocab, Log, load_library, system_info, version
from edge_rt.catalog.gguf import GgufHeader
from edge_rt.catalog.lora import check_adapter, check_numbers
from edge_rt.devices import cpu
from edge_rt.errors import BackendLoadError, BackendStepError, BackendUnavailableError
from edge_rt.types import Adapter, AdapterFile, Capabilities

_KV_TYPES = {"f16": (1, 2.0), "q8_0": (8, 34 / 32)}  # ggml_type, bytes per element
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


def open_session(file: ModelFile, options: LoadOptions, *, is_interrupted: Callable[[], bool]) -> LlamaCpuSession:
    """Load a model; give up with BackendLoadError once is_interrupted says so."""
    if reason := LlamaCpuBackend().supports(file, options):  # llama.cpp aborts on crafted files: ours looks first
        raise BackendLoadError(model=file.model, reason=reason)
    lib, log = load_library()
    log.lines.clear()
    return LlamaCpuSession(lib, log, file, options, is_interrupted)


def _estimate(header: GgufHeader, options: LoadOptions) -> MemoryNeed:
    _, kv_element_bytes = _KV_TYPES[options.kv_type]
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
    """A llama.cpp model and context. KV cells are one unified pool of n_ctx for all sequences."""

    def __init__(
        self,
        lib: Any,
        log: Log,
        file: ModelFile,
        options: LoadOptions,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._lib, self._log = lib, log
        self._model = self._ctx = None
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
        self._ctx = lib.llama_init_from_model(self._model, _context_params(lib, options, n_threads))
        if not self._ctx:
            self.close()
            raise BackendLoadError(model=file.model, reason=log.reason())
        self._memory = lib.llama_get_memory(self._ctx)
        self._adapters: dict[str, Any] = {}
        for adapter in options.adapters:
            self._open_adapter(adapter, file)
        self._batch = _Batch(lib, options.n_batch)
        self._logits_type: Any = ctypes.c_float * n_vocab
        self._views: dict[int, NDArray[np.float32]] = {}
        key = struct.pack("<4sQQI", _STATE_MAGIC, header.file_bytes, header.n_params, options.n_ctx)
        self._state_key = np.frombuffer(key, dtype=np.uint8)
        self.caps = Capabilities(
            n_ctx=options.n_ctx,
            n_seq_max=options.n_seq_max,
            n_vocab=n_vocab,
            n_batch=options.n_batch,
            can_trim=not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model)),
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
        self._check_open()
        n = len(adapters)
        pointers = (ctypes.c_void_p * n)(
            *(ctypes.cast(self._adapters[adapter.name], ctypes.c_void_p) for adapter in adapters)
        )
        scales = (ctypes.c_float * n)(*(adapter.scale for adapter in adapters))
        set_adapters = self._lib.llama_set_adapters_lora
        if set_adapters(self._ctx, ctypes.cast(pointers, set_adapters.argtypes[1]), n, scales) != 0:
            raise BackendStepError(reason=f"llama.cpp cannot use the adapters: {self._log.reason()}")

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        return self._tokenizer.tokenize(text, special=special, add_bos=add_bos)

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        return self._tokenizer.piece(token_id, special=special)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        self._check_open()
        outputs = self._batch.fill(batch)
        status = self._lib.llama_decode(self._ctx, self._batch.struct)
        if status == 1:
            raise NoCellsError
        if status != 0:
            raise BackendStepError(reason=f"llama_decode returned {status}: {self._log.reason()}")
        return [
            self._logits(rows) if isinstance(rows, int) else np.stack([self._logits(i) for i in rows])
            for rows in outputs
        ]

    def _logits(self, row: int) -> NDArray[np.float32]:
        pointer = self._lib.llama_get_logits_ith(self._ctx, row)
        address = ctypes.c_void_p.from_buffer(pointer).value
        if address is None:
            raise BackendStepError(reason=f"llama.cpp kept no logits for row {row}")
        view = self._views.get(address)
        if view is None:  # llama.cpp writes into the same few places over and over
            if len(self._views) > self.caps.n_batch:
                self._views.clear()
            view = np.frombuffer(self._logits_type.from_address(address), dtype=np.float32)
            self._views[address] = view
        return view

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, src, dst, 0, n_tokens)

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, seq_id, n_tokens, -1):
            raise BackendStepError(reason=f"this model cannot forget the tail of a sequence at {n_tokens}")

    def seq_length(self, seq_id: int) -> int:
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def seq_bytes(self, seq_id: int) -> int:
        return len(self._state_key) + int(self._lib.llama_state_seq_get_size(self._ctx, seq_id))

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        if start != 0 or end not in (None, self.seq_length(seq_id)):
            raise BackendStepError(reason="llama.cpp saves whole sequences only")
        head = len(self._state_key)
        state = np.empty(self.seq_bytes(seq_id), dtype=np.uint8)
        state[:head] = self._state_key
        written = self._lib.llama_state_seq_get_data(self._ctx, _bytes_at(state, head), state.nbytes - head, seq_id)
        return state[: head + written]

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        head = len(self._state_key)
        if not np.array_equal(state[:head], self._state_key):
            raise BackendStepError(reason="the saved sequence belongs to another model or context size")
        if self._lib.llama_state_seq_set_data(self._ctx, _bytes_at(state, head), state.nbytes - head, seq_id) == 0:
            self.seq_trim(seq_id, 0)
            raise BackendStepError(reason=f"the saved sequence cannot be restored: {self._log.reason()}")

    def set_threads(self, n_threads: int) -> None:
        self._lib.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def _check_open(self) -> None:
        if self._ctx is None:
            raise BackendStepError(reason="the session is closed")

    def close(self) -> None:
        if self._ctx:
            self._tokenizer.close()
            self._lib.llama_free(self._ctx)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._ctx = self._model = None


def _bytes_at(array: NDArray[np.uint8], offset: int) -> Any:
    """Point into an array, which must outlive the use."""
    return ctypes.cast(array.ctypes.data + offset, ctypes.POINTER(ctypes.c_uint8))


def _context_params(lib: Any, options: LoadOptions, n_threads: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = options.n_batch
    params.n_ubatch = min(options.n_batch, options.n_ubatch)
    params.n_seq_max = options.n_seq_max
    params.kv_unified = True  # sequences share the cells: one long request may use what idle ones do not
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k = params.type_v = _KV_TYPES[options.kv_type][0]
    params.no_perf = True
    return params


class _Batch:
    """A llama_batch over numpy buffers, so that filling it costs a few slices instead of a call per row."""

    def __init__(self, lib: Any, n_max: int) -> None:
        self.n_max = n_max
        self._ramp = np.arange(n_max, dtype=np.int32)
        self._token = np.zeros(n_max, np.int32)
        self._pos = np.zeros(n_max, np.int32)
        self._n_seq_id = np.ones(n_max, np.int32)
        self._seq_id = np.zeros(n_max, np.int32)
        self._logits = np.zeros(n_max, np.int8)
        # llama_batch wants a pointer per row to that row's list of sequence ids; ours are lists of one
        self._seq_pointer = self._seq_id.ctypes.data + 4 * np.arange(n_max, dtype=np.uint64)
        self.struct = lib.llama_batch()
        self.struct.embd = None
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq_id),
            ("seq_id", self._seq_pointer),
            ("logits", self._logits),
        ):
            field_type = dict(lib.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, field_type))

    def fill(self, batch: Sequence[SeqRows]) -> list[int | range]:
        """Write the rows; give the row numbers whose logits each asking SeqRows gets."""
        n = 0
        outputs: list[int | range] = []
        n_rows = sum(len(rows.token_ids) for rows in batch)
        if n_rows > self.n_max:
            raise BackendStepError(reason=f"{n_rows} rows in one batch, the limit is {self.n_max}")
        for rows in batch:
            end = n + len(rows.token_ids)
            if end == n + 1:  # a decoding sequence: scalars are several times cheaper than slices
                self._token[n], self._pos[n], self._seq_id[n] = rows.token_ids[0], rows.start, rows.seq_id
                self._logits[n] = rows.want_all or rows.want_logits
            else:
                self._token[n:end] = rows.token_ids
                self._pos[n:end] = self._ramp[: end - n] + rows.start
                self._seq_id[n:end] = rows.seq_id
                self._logits[n:end] = rows.want_all
                self._logits[end - 1] |= rows.want_logits
            if rows.want_all:
                outputs.append(range(n, end))
            elif rows.want_logits:
                outputs.append(end - 1)
            n = end
        self.struct.n_tokens = n
        return outputs
