"""A llama.cpp context, and a batch for it: rows of sequences in, logits and sequences' KV out.

The context is made anew, with all that its sequences hold, where llama_cells wants its cells in another layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import LoadOptions, NoCellsError, SeqRows
from edge_rt.backends.llama_cells import MIN_ROWS, LayoutChoice, Parts, part_tokens
from edge_rt.backends.llama_library import Log
from edge_rt.errors import BackendStepError

KV_TYPES = {"f16": (1, 2.0), "q8_0": (8, 34 / 32)}  # ggml_type, bytes per element
_N_STREAMS_AT = 8  # in what llama.cpp saves of a sequence, behind a magic and the sequence's id


class LlamaContext:
    """The context of one model: its sequences by the engine's ids, wherever their cells lie.

    can_part  whether llama.cpp can lay out this model's cells in parts, and restores what it has saved of one cache

    Raises BackendStepError where there is no context to begin with, and where a new layout fails: then it is closed.
    While cells are laid out anew what they hold is in memory twice. Logits are views of the context's memory: nothing
    that may lay cells out anew, as decode and seq_load may, is to be called before they have been read.
    """

    def __init__(
        self, lib: Any, log: Log, model: Any, options: LoadOptions, *, n_threads: int, n_vocab: int, can_part: bool
    ) -> None:
        self._lib, self._log, self._model, self._options = lib, log, model, options
        self._n_seq_max, self._n_threads = options.n_seq_max, n_threads
        self._n_part = part_tokens(options.n_ctx, options.n_seq_max) if can_part else 0
        self._choice = LayoutChoice(self._n_part)
        self._parts: Parts | None = None  # in the pool a sequence's id is its own
        self._adapters: Sequence[tuple[Any, float]] = ()
        self._batch = _Batch(lib, options.n_batch)
        self._logits_type: Any = ctypes.c_float * n_vocab
        self._views: dict[int, NDArray[np.float32]] = {}
        self._ctx: Any = None
        self._memory: Any = None
        self._make(in_parts=self._n_part > 0)

    def close(self) -> None:
        if self._ctx:
            self._lib.llama_free(self._ctx)
        self._ctx = None

    @property
    def is_open(self) -> bool:
        return self._ctx is not None

    @property
    def is_in_parts(self) -> bool:
        return self._parts is not None

    def set_threads(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._lib.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def set_adapters(self, adapters: Sequence[tuple[Any, float]]) -> None:
        """Compute all further steps with these LoRA adapters of llama.cpp, each with its scale."""
        n = len(adapters)
        pointers = (ctypes.c_void_p * n)(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer, _ in adapters))
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        set_adapters = self._lib.llama_set_adapters_lora
        if set_adapters(self._ctx, ctypes.cast(pointers, set_adapters.argtypes[1]), n, scales) != 0:
            raise BackendStepError(reason=f"llama.cpp cannot use the adapters: {self._log.reason()}")
        self._adapters = adapters

    # -- steps -----------------------------------------------------------------------------------------------------

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        """Compute rows, as TokenSession.decode says."""
        if self._n_part:
            self._lay_out_for(batch)
        outputs = self._batch.fill(batch, [self._place(rows.seq_id) for rows in batch])
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
            if len(self._views) > self._batch.n_max:
                self._views.clear()
            view = np.frombuffer(self._logits_type.from_address(address), dtype=np.float32)
            self._views[address] = view
        return view

    # -- sequences -------------------------------------------------------------------------------------------------

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        if self._parts is None:
            self._lib.llama_memory_seq_cp(self._memory, src, dst, 0, n_tokens)
        elif n_tokens > 0:
            self.seq_load(dst, self.seq_save(src))
            self.seq_trim(dst, n_tokens)

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        place = self._place_of_held(seq_id)
        if place is None:
            return
        if not self._lib.llama_memory_seq_rm(self._memory, place, n_tokens, -1):
            raise BackendStepError(reason=f"this model cannot forget the tail of a sequence at {n_tokens}")
        if n_tokens == 0 and self._parts is not None:
            self._parts.free(seq_id)

    def seq_length(self, seq_id: int) -> int:
        place = self._place_of_held(seq_id)
        return 0 if place is None else int(self._lib.llama_memory_seq_pos_max(self._memory, place)) + 1

    def seq_bytes(self, seq_id: int) -> int:
        place = self._place_of_held(seq_id)
        if place is None:
            return _N_STREAMS_AT + 8  # that, and a count of cells
        return int(self._lib.llama_state_seq_get_size(self._ctx, place)) - 4 * (self._n_streams - 1)

    def seq_save(self, seq_id: int, n_head: int = 0) -> NDArray[np.uint8]:
        """Copy out a sequence's KV as the pool would give it, in bytes behind n_head that the caller may fill."""
        place = self._place(seq_id)
        n_bytes = int(self._lib.llama_state_seq_get_size(self._ctx, place))
        state = np.empty(n_head + n_bytes, dtype=np.uint8)
        written = int(self._lib.llama_state_seq_get_data(self._ctx, _bytes_at(state, n_head), n_bytes, place))
        state = state[: n_head + written]
        if self._parts is None:
            return state
        # A count of cells for each part, 0 for all others; only the sequence's own has something behind it.
        head = state[n_head : n_head + _N_STREAMS_AT + 4].copy()
        n_streams = head[_N_STREAMS_AT:].view(np.uint32)
        if written < _N_STREAMS_AT + 4 + 4 * self._n_streams or n_streams[0] != self._n_streams:
            raise BackendStepError(reason="llama.cpp saves sequences in a form that is not known")
        n_streams[0] = 1
        state = state[4 * place : len(state) - 4 * (self._n_streams - 1 - place)]
        state[n_head : n_head + len(head)] = head
        return state

    def seq_load(self, seq_id: int, state: NDArray[np.uint8], n_head: int = 0) -> None:
        """Restore what seq_save gave into an empty sequence. Raises BackendStepError; the sequence is empty then.

        One that is longer than a part takes all to the pool, as it would by growing.
        """
        if self._parts is not None and _n_saved_tokens(state, n_head) > self._n_part:
            self._lay_out(in_parts=False)
        place = self._place(seq_id)
        if self._parts is not None:
            own = np.zeros(len(state) - n_head + 4 * (self._n_streams - 1), dtype=np.uint8)
            own[: len(state) - n_head] = state[n_head:]
            own[_N_STREAMS_AT : _N_STREAMS_AT + 4].view(np.uint32)[0] = self._n_streams
            state, n_head = own, 0
        if self._lib.llama_state_seq_set_data(self._ctx, _bytes_at(state, n_head), len(state) - n_head, place) == 0:
            self.seq_trim(seq_id, 0)
            raise BackendStepError(reason=f"the saved sequence cannot be restored: {self._log.reason()}")

    # -- where cells lie -------------------------------------------------------------------------------------------

    @property
    def _n_streams(self) -> int:
        return 1 if self._parts is None else self._n_seq_max

    def _place(self, seq_id: int) -> int:
        return seq_id if self._parts is None else self._parts.give(seq_id)

    def _place_of_held(self, seq_id: int) -> int | None:
        return seq_id if self._parts is None else self._parts.part(seq_id)

    def _lay_out_for(self, batch: Sequence[SeqRows]) -> None:
        """Bring the cells into the layout that a step needs, or that steps like it have deserved."""
        longest = max(rows.start + len(rows.token_ids) for rows in batch)
        if self._parts is None and len(batch) >= MIN_ROWS:
            longest = max(longest, *(self.seq_length(seq_id) for seq_id in range(self._n_seq_max)))
        shares = any(rows.shares for rows in batch)
        in_parts = self._choice.in_parts(longest, len(batch), is_in_parts=self.is_in_parts, shares=shares)
        if in_parts != self.is_in_parts:
            self._lay_out(in_parts=in_parts)
        if self._parts is not None:
            new = self._parts.to_join([rows.seq_id for rows in batch])
            held = self._take_out(new)
            self._parts.moved(new)
            self._put_in(held)

    def _lay_out(self, *, in_parts: bool) -> None:
        held = self._take_out(range(self._n_seq_max))
        self._make(in_parts=in_parts)
        self._put_in(held)

    def _take_out(self, seq_ids: Iterable[int]) -> dict[int, NDArray[np.uint8]]:
        held = {seq_id: self.seq_save(seq_id) for seq_id in seq_ids if self.seq_length(seq_id)}
        for seq_id in held:
            self._lib.llama_memory_seq_rm(self._memory, self._place(seq_id), 0, -1)  # its part stays its own
        return held

    def _put_in(self, held: dict[int, NDArray[np.uint8]]) -> None:
        try:
            for seq_id, state in held.items():
                self.seq_load(seq_id, state)
        except BackendStepError:
            self.close()  # what is lost is not known to whoever uses the other sequences
            raise

    def _make(self, *, in_parts: bool) -> None:
        self.close()
        self._views.clear()
        self._parts = Parts(self._n_seq_max) if in_parts else None
        ctx = self._lib.llama_init_from_model(self._model, self._params(in_parts=in_parts))
        if not ctx:
            raise BackendStepError(reason=f"llama.cpp gives no context: {self._log.reason()}")
        self._ctx, self._memory = ctx, self._lib.llama_get_memory(ctx)
        if self._adapters:
            self.set_adapters(self._adapters)

    def _params(self, *, in_parts: bool) -> Any:
        options = self._options
        params = self._lib.llama_context_default_params()
        params.n_ctx = self._n_part * options.n_seq_max if in_parts else options.n_ctx
        params.n_batch = options.n_batch
        params.n_ubatch = min(options.n_batch, options.n_ubatch)
        params.n_seq_max = options.n_seq_max
        params.kv_unified = not in_parts
        params.n_threads = params.n_threads_batch = self._n_threads
        params.type_k = params.type_v = KV_TYPES[options.kv_type][0]
        params.no_perf = True
        return params


def _n_saved_tokens(state: NDArray[np.uint8], n_head: int) -> int:
    """Read how many tokens a saved sequence has; 0 of what is too short to be one."""
    count = state[n_head + _N_STREAMS_AT + 4 : n_head + _N_STREAMS_AT + 8]
    return int(count.copy().view(np.uint32)[0]) if len(count) == 4 else 0


def _bytes_at(array: NDArray[np.uint8], offset: int) -> Any:
    """Point into an array, which must outlive the use."""
    return ctypes.cast(array.ctypes.data + offset, ctypes.POINTER(ctypes.c_uint8))


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

    def fill(self, batch: Sequence[SeqRows], places: Sequence[int]) -> list[int | range]:
        """Write the rows by rising places; give the row numbers whose logits each asking SeqRows gets, in batch order.

        llama.cpp joins the rows of neighbours only where they come in this order.
        """
        n = 0
        n_rows = sum(len(rows.token_ids) for rows in batch)
        if n_rows > self.n_max:
            raise BackendStepError(reason=f"{n_rows} rows in one batch, the limit is {self.n_max}")
        wanted: list[tuple[int, int | range]] = []
        for i in sorted(range(len(batch)), key=places.__getitem__):
            rows, place = batch[i], places[i]
            end = n + len(rows.token_ids)
            if end == n + 1:  # a decoding sequence: scalars are several times cheaper than slices
                self._token[n], self._pos[n], self._seq_id[n] = rows.token_ids[0], rows.start, place
                self._logits[n] = rows.want_all or rows.want_logits
            else:
                self._token[n:end] = rows.token_ids
                self._pos[n:end] = self._ramp[: end - n] + rows.start
                self._seq_id[n:end] = place
                self._logits[n:end] = rows.want_all
                self._logits[end - 1] |= rows.want_logits
            if rows.want_all:
                wanted.append((i, range(n, end)))
            elif rows.want_logits:
                wanted.append((i, end - 1))
            n = end
        self.struct.n_tokens = n
        return [output for _, output in sorted(wanted, key=lambda own: own[0])]
