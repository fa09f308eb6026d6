"""edge_rt's own engine on the CPU: weights packed for the instruction set, paged KV, a thread pool of its own.

It reads the llama family of GGUF files as far as docs/native.md says and refuses the rest by name. The tokenizer is
llama.cpp's. One thread owns a session.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
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
    Vocab,
    model_info,
)
from edge_rt.backends.drafting import HeadAsk
from edge_rt.backends.interrupt import interrupt_held
from edge_rt.backends.llama_library import LlamaVocab, load_library
from edge_rt.backends.native_config import NativeConfig, engine_config, read_config
from edge_rt.backends.native_draft import NativeDraft
from edge_rt.backends.native_library import (
    ERRORS,
    FIXED,
    KV_BLOCK,
    KV_TYPES,
    LAYER,
    LINEAR_FAILED,
    MAX_THREADS,
    NO_CELLS,
    TYPES,
    Rows,
    Tensor,
    build,
    isa_names,
    load_native,
)
from edge_rt.backends.native_weights import ExternalWeights, Multiply, NativeWeights
from edge_rt.catalog.draft_head import DraftHead
from edge_rt.catalog.gguf import GgufHeader, TensorInfo
from edge_rt.devices import cpu
from edge_rt.errors import BackendLoadError, BackendStepError, BackendUnavailableError, ModelFormatError
from edge_rt.types import Capabilities

_log = logging.getLogger(__name__)

_STATE = struct.Struct("<4sQQIIII")  # magic, file bytes, parameters, n_ctx, type of KV, first position, tokens
_STATE_MAGIC = b"ERTN"
_NOWHERE = 4096  # where tensors are said to be when only their shapes are looked at


class NativeBackend:
    """Loads GGUF models of the llama family into edge_rt's own engine."""

    name: ClassVar[str] = "native"

    def __init__(self, usable: Callable[[], cpu.Usable] = cpu.usable) -> None:
        self._usable = usable

    def probe(self) -> tuple[Device, ...] | Absent:
        try:
            lib = load_native()
            load_library()  # for its tokenizer
        except BackendUnavailableError as exc:
            return Absent(reason=exc.reason, extra=exc.extra)
        *others, best = isa_names(lib)
        rest = f" (also usable: {', '.join(others)})" if others else ", which no instruction set of this CPU speeds up"
        detail = f"edge_rt's own engine with its {best} kernels{rest}"
        return (Device(id="cpu", kind="cpu", detail=detail, reference=not others),)

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:
        header = file.header
        try:
            config = read_config(file.model, str(file.path), header)
        except BackendLoadError as exc:
            return exc.reason
        except ModelFormatError as exc:  # what the engine cannot take need not be wrong
            return f"the native engine cannot use {exc.field}: {exc.problem}"
        if options.adapters:
            return "the native engine computes with no LoRA adapters"
        if options.kv_type not in KV_TYPES:
            return f"the native engine keeps KV as {' or '.join(KV_TYPES)}, not {options.kv_type}"
        tensors = _tensors(header, _NOWHERE)
        settings = engine_config(config, None)
        error = ctypes.create_string_buffer(256)
        counted = load_native().en_pack_model(
            ctypes.byref(settings), tensors, len(tensors), -1, None, error, len(error)
        )
        if counted < 0:
            return f"the native engine cannot take it: {error.value.decode()}"
        return None

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        """Estimate from the header alone: the weights packed, and the rows of the embedding that tokens touch."""
        header = file.header
        n_ff = max(header.n_ff)
        row_floats = 6 * header.embedding_length + 3 * n_ff
        return MemoryNeed(
            weights_bytes=sum(t.size_bytes for t in header.tensors),
            kv_bytes=_kv_bytes(header, options),
            scratch_bytes=min(options.n_batch, options.n_ubatch) * row_floats * 4
            + options.n_logits_max * header.n_vocab * 4
            + 48 * 2**20,  # the vocabulary in llama.cpp, and Python's and numpy's own
        )

    def load(self, file: ModelFile, options: LoadOptions) -> NativeSession:
        if reason := self.supports(file, options):
            raise BackendLoadError(model=file.model, reason=reason)
        config = read_config(file.model, str(file.path), file.header)
        return NativeSession(load_native(), file, file.header, config, options, self._usable())


def _kv_bytes(header: GgufHeader, options: LoadOptions) -> int:
    """Count whole blocks of 32 tokens; q8_0 adds a float for the K and the V of each token and head."""
    n_tokens = -(-options.n_ctx // KV_BLOCK) * KV_BLOCK
    if options.kv_type == "q8_0":
        return n_tokens * (header.kv_elements_per_token + 2 * 4 * sum(header.n_kv_heads))
    return n_tokens * 2 * header.kv_elements_per_token


class NativeSession:
    """A model packed for this CPU and its context. KV is one pool of blocks of 32 tokens, n_ctx tokens in all.

    multiply  multiplies the matrices, which are then not packed here; backend is the name of whose session it is
    """

    vocab: Vocab

    def __init__(
        self,
        lib: Any,
        file: ModelFile,
        header: GgufHeader,
        config: NativeConfig,
        options: LoadOptions,
        usable: cpu.Usable,
        *,
        multiply: Multiply | None = None,
        backend: str = NativeBackend.name,
    ) -> None:
        self._lib, self._usable, self._multiply, self._backend = lib, usable, multiply, backend
        self._weights: NativeWeights | ExternalWeights | None = None
        self._n_embd = header.embedding_length
        self._head: NativeDraft | None = None
        self._context = self._vocab_model = None
        self._tokenizers: list[LlamaVocab] = []  # one, once the vocabulary is loaded
        self._n_state = (header.file_bytes, header.n_params, options.n_ctx, KV_TYPES[options.kv_type])
        self._logits = np.empty((1, header.n_vocab), dtype=np.float32)
        self._block_bytes = _kv_bytes(header, options) // -(-options.n_ctx // KV_BLOCK)
        self.caps = Capabilities(
            n_ctx=options.n_ctx,
            n_seq_max=options.n_seq_max,
            n_vocab=header.n_vocab,
            n_batch=options.n_batch,
            can_trim=True,
            can_copy=True,
            can_save=True,
            can_save_ranges=True,
            n_cell_block=KV_BLOCK,
            reads_own_cells=True,
            is_batch_invariant=True,
            copies_share=True,
        )
        try:
            self._open(file, header, config, options)
        except BaseException:
            self.close()
            raise

    def _open(self, file: ModelFile, header: GgufHeader, config: NativeConfig, options: LoadOptions) -> None:
        n_threads = min(options.n_threads or len(self._usable.compute_cpus), MAX_THREADS)
        self._tokenizers.append(self._open_vocab(file, header))
        if self._tokenizers[0].n_vocab != header.n_vocab:
            raise BackendLoadError(model=file.model, reason="tokenizer and embedding have different vocabularies")
        self._weights = weights = self._open_weights(file, config, options)
        error = ctypes.create_string_buffer(256)
        self._context = self._lib.en_context_new(
            weights.pointer,
            options.n_ctx,
            options.n_seq_max,
            min(options.n_batch, options.n_ubatch),
            n_threads,
            KV_TYPES[options.kv_type],
            error,
            len(error),
        )
        if not self._context:
            raise BackendLoadError(model=file.model, reason=error.value.decode())
        if isinstance(weights, ExternalWeights):
            weights.serve(self._context)
        self._pin(n_threads)
        self.vocab = self._tokenizers[0].facts
        info = model_info(file, options, self.caps, backend=self._backend, n_threads=n_threads)
        self.info = replace(info, build=f"{build()} {self._lib.en_model_isa(weights.pointer).decode()}")

    def _open_vocab(self, file: ModelFile, header: GgufHeader) -> LlamaVocab:
        llama, log = load_library()
        log.lines.clear()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._llama = llama
        with interrupt_held():
            self._vocab_model = llama.llama_model_load_from_file(os.fsencode(file.path), params)
        if not self._vocab_model:
            raise BackendLoadError(model=file.model, reason=log.reason())
        return LlamaVocab(llama, self._vocab_model, header)

    def _open_weights(
        self, file: ModelFile, config: NativeConfig, options: LoadOptions
    ) -> NativeWeights | ExternalWeights:
        header = file.header
        with file.path.open("rb") as opened:
            self._mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        tensors = _tensors(header, self._bytes.ctypes.data + header.data_offset)
        settings = engine_config(config, self._rope_factors(file, config.rope.factors_tensor(options.n_ctx)))
        if self._multiply is not None:
            return ExternalWeights(self._lib, file.model, settings, tensors, self._multiply)
        weights = NativeWeights(self._lib, file.model, file.path, settings, tensors, packed_copy=options.packed_copy)
        self._mapping.madvise(mmap.MADV_DONTNEED)  # all is packed; the rows of the embedding come back as they are used
        return weights

    def _rope_factors(self, file: ModelFile, name: str | None) -> list[float] | None:
        """Read the divisors of RoPE's frequencies; the configuration has checked type and shape."""
        if name is None:
            return None
        info = next(t for t in file.header.tensors if t.name == name)
        start = file.header.data_offset + info.offset
        factors = self._bytes[start : start + info.size_bytes].view(np.float32)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelFormatError(path=str(file.path), field=f"tensor {name}", problem="not all numbers are above 0")
        return [float(f) for f in factors]

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        return self._tokenizers[0].tokenize(text, special=special, add_bos=add_bos)

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        return self._tokenizers[0].piece(token_id, special=special)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        rows = (Rows * len(batch))()
        kept = []  # the ids must outlive the call
        outputs: list[int | slice] = []
        n_rows = n_logits = 0
        for row, entry in zip(rows, batch, strict=True):
            n = len(entry.token_ids)
            ids = (ctypes.c_int32 * n)(*entry.token_ids)
            kept.append(ids)
            row.seq_id, row.start, row.n, row.token_ids = entry.seq_id, entry.start, n, ctypes.addressof(ids)
            row.want = 2 if entry.want_all else int(entry.want_logits)
            if entry.want_all:
                outputs.append(slice(n_logits, n_logits + n))
                n_logits += n
            elif entry.want_logits:
                outputs.append(n_logits)
                n_logits += 1
            n_rows += n
        if n_rows > self.caps.n_batch:
            raise BackendStepError(reason=f"{n_rows} rows in one batch, the limit is {self.caps.n_batch}")
        if n_logits > len(self._logits):
            self._logits = np.empty((n_logits, self.caps.n_vocab), dtype=np.float32)
        status = self._lib.en_decode(self._opened(), rows, len(batch), self._logits.ctypes.data)
        if status == NO_CELLS:
            raise NoCellsError
        if status == LINEAR_FAILED and isinstance(self._weights, ExternalWeights) and self._weights.error is not None:
            raise self._weights.error
        _check(status)
        return [self._logits[where] for where in outputs]

    def keep_states(self, n_each: int) -> None:
        """Keep the hidden states of each sequence's last n_each rows whose logits were wanted, for state to give."""
        _check(self._lib.en_keep_states(self._opened(), n_each))

    def state(self, seq_id: int, position: int) -> NDArray[np.float32]:
        """Give a kept state, (n_embd,), as the output norm takes it. Raises BackendStepError where it is not kept."""
        state = np.empty(self._n_embd, dtype=np.float32)
        _check(self._lib.en_seq_state(self._opened(), seq_id, position, state.ctypes.data))
        return state

    def load_head(self, head: DraftHead) -> None:
        self._head = NativeDraft(self._lib, self._opened, head)

    def head_bytes(self) -> int:
        return self._head.n_bytes if self._head is not None else 0

    def can_draft(self, seq_id: int) -> bool:
        return self._head is not None and self._head.can_draft(seq_id)

    def draft(self, asks: Sequence[HeadAsk]) -> list[tuple[list[int], list[float]]]:
        if self._head is None:
            raise BackendStepError(reason="there is no draft head")
        return self._head.draft(asks)

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        _check(self._lib.en_seq_copy(self._opened(), src, dst, n_tokens))

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        _check(self._lib.en_seq_trim(self._opened(), seq_id, n_tokens))

    def seq_bytes(self, seq_id: int) -> int:
        return _STATE.size + int(self._lib.en_seq_bytes(self._opened(), seq_id))

    def seq_length(self, seq_id: int) -> int:
        return max(0, int(self._lib.en_seq_length(self._opened(), seq_id)))

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        context, n_held = self._opened(), self.seq_length(seq_id)
        end = n_held if end is None else end
        is_part = (start, end) != (0, n_held)
        if is_part and not self.caps.can_save_ranges:
            raise BackendStepError(reason="this library saves whole sequences only")
        if not 0 <= start <= end <= n_held or start % KV_BLOCK or (end % KV_BLOCK and end != n_held):
            raise BackendStepError(reason=f"positions {start} to {end} are no blocks of a sequence of {n_held}")
        n_blocks = -(-(end - start) // KV_BLOCK)
        state = np.empty(_STATE.size + n_blocks * self._block_bytes, dtype=np.uint8)
        head = _STATE.pack(_STATE_MAGIC, *self._n_state, start, end - start)
        state[: _STATE.size] = np.frombuffer(head, dtype=np.uint8)
        where = state.ctypes.data + _STATE.size
        if is_part:
            _check(self._lib.en_seq_save_blocks(context, seq_id, start // KV_BLOCK, n_blocks, where))
        else:
            _check(self._lib.en_seq_save(context, seq_id, where))
        return state

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        head = state[: _STATE.size].tobytes()
        foreign = len(head) < _STATE.size or _STATE.unpack(head)[:-2] != (_STATE_MAGIC, *self._n_state)
        if foreign:
            raise BackendStepError(reason="the saved sequence belongs to another model, context size or type of KV")
        body = np.ascontiguousarray(state[_STATE.size :])
        start, n_tokens = _STATE.unpack(head)[-2:]
        if start != (n_held := self.seq_length(seq_id)):
            raise BackendStepError(reason=f"a part from position {start} on does not follow {n_held} positions")
        load = self._lib.en_seq_append if start else self._lib.en_seq_load
        status = load(self._opened(), seq_id, n_tokens, body.ctypes.data, body.nbytes)
        if status == NO_CELLS:
            raise BackendStepError(reason="the saved sequence cannot be restored: the KV cells do not suffice")
        _check(status)

    def set_threads(self, n_threads: int) -> None:
        context, n_threads = self._opened(), min(n_threads, MAX_THREADS)
        _check(self._lib.en_set_cpus(context, None, 0))
        _check(self._lib.en_set_threads(context, n_threads))
        self._pin(n_threads)

    def _pin(self, n_threads: int) -> None:
        cpus = self._usable.pinned(n_threads)
        status = self._lib.en_set_cpus(self._opened(), (ctypes.c_int32 * len(cpus))(*cpus), len(cpus))
        if status != 0:  # which CPUs the process may use has changed since they were looked up
            _log.warning("threads are not pinned to cpu %s: %s", cpus, ERRORS.get(status, status))

    def _opened(self) -> int:
        if self._context is None:
            raise BackendStepError(reason="the session is closed")
        return int(self._context)

    def close(self) -> None:
        if self._context:
            self._lib.en_context_free(self._context)
        if self._weights:
            self._weights.close()
        if self._vocab_model:
            for tokenizer in self._tokenizers:
                tokenizer.close()
            self._llama.llama_model_free(self._vocab_model)
        self._weights = self._context = self._vocab_model = None


def _tensors(header: GgufHeader, base: int) -> ctypes.Array[Tensor]:
    """List the file's tensors in the engine's order; their data begin at base."""
    by_name = {t.name: t for t in header.tensors}
    names = [*FIXED, *(f"blk.{i}.{name}" for i in range(header.n_layers) for name in LAYER)]
    return (Tensor * len(names))(*(_tensor(base, by_name.get(name)) for name in names))


def _tensor(base: int, info: TensorInfo | None) -> Tensor:
    if info is None:
        return Tensor()
    n_rows = int(np.prod(info.shape[1:], dtype=np.int64))
    return Tensor(base + info.offset, info.size_bytes, info.shape[0], n_rows, TYPES[info.type], 0)


def _check(status: int) -> None:
    if status != 0:
        raise BackendStepError(reason=ERRORS.get(status, f"the native engine gave status {status}"))
