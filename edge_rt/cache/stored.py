"""A stored answer: how it is gathered while it streams, kept as JSON, and given again as a stream."""

from __future__ import annotations

from typing import Final

import msgspec

from edge_rt.cache.admission import age_s
from edge_rt.types import CacheState, Chunk, Origin, Timings, TokenLogprob, Usage

KIND: Final = "answer"

_PIECE_CHARS: Final = 2048  # what a client gets at once; some read lines of a few ten thousand characters only
_TITLE_CHARS: Final = 80
_MAX_QUESTION_CHARS: Final = 4000


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of the answer: whole characters, and the tokens that were sent with them."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer that ended by itself (finish reason stop), and what was asked.

    question     the last user message or the prompt, the beginning of a long one
    partition    key.partition_key in hex, of questions that may be compared with this one; "" for none
    created_at_s by the wall clock
    compute_s    what it took to compute, without waiting
    cost         what the cloud charged for it
    is_corrected its text was set by hand
    stopped_by   the stop string that ended it
    """

    model: str
    pieces: tuple[Piece, ...]
    prompt_tokens: int
    completion_tokens: int
    created_at_s: float
    variant: str = ""
    endpoint: str = ""
    question: str = ""
    partition: str = ""
    compute_s: float = 0.0
    cost: float | None = None
    is_deterministic: bool = False
    is_corrected: bool = False
    stopped_by: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


_DECODER: Final = msgspec.json.Decoder(StoredAnswer)
_ENCODER: Final = msgspec.json.Encoder()


def encode(answer: StoredAnswer) -> bytes:
    """Write an answer as JSON; the raw bytes of tokens as base64."""
    return _ENCODER.encode(answer)


def decode(value: bytes) -> StoredAnswer | None:
    """Read what encode wrote; None for what another version of edge_rt wrote."""
    try:
        return _DECODER.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def title(question: str) -> str:
    """Give a question's beginning, on one line."""
    return " ".join(question[: _TITLE_CHARS * 2].split())[:_TITLE_CHARS]


def shortened(question: str) -> str:
    return question[:_MAX_QUESTION_CHARS]


def pieces_of(text: str) -> tuple[Piece, ...]:
    """Divide a text that no tokens are known of."""
    return tuple(Piece(text[at : at + _PIECE_CHARS]) for at in range(0, len(text), _PIECE_CHARS)) or (Piece(""),)


class Recorder:
    """Gathers an answer's chunks as they pass; one that grows beyond max_bytes is let go."""

    def __init__(self, max_bytes: int, epoch: int = 0) -> None:
        self.epoch = epoch  # of the store when the answer was begun
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._n_chars = 0
        self.last: Chunk | None = None  # with finish reason, usage and timings; None: the answer is not whole
        self.origin = Origin()

    @property
    def size_bytes(self) -> int:
        """Estimate what the answer takes when it is stored."""
        return self._n_bytes

    def add(self, chunk: Chunk) -> None:
        if chunk.origin is not None:
            self.origin = chunk.origin
        if chunk.finish_reason is not None:
            self.last = chunk
        self._n_bytes += len(chunk.text.encode("utf-8", "replace")) + 7 * len(chunk.token_ids)
        self._n_bytes += sum(40 + 40 * (1 + len(logprob.top)) for logprob in chunk.logprobs)
        if self._n_bytes > self._max_bytes:
            self._pieces.clear()
            self._clear_piece()
            return
        self._texts.append(chunk.text)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._n_chars += len(chunk.text)
        if self._n_chars >= _PIECE_CHARS:
            self._end_piece()

    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces())

    def pieces(self) -> tuple[Piece, ...]:
        if self._texts:
            self._end_piece()
        return tuple(self._pieces)

    def _end_piece(self) -> None:
        self._pieces.append(Piece("".join(self._texts), tuple(self._token_ids), tuple(self._logprobs)))
        self._clear_piece()

    def _clear_piece(self) -> None:
        self._texts, self._token_ids, self._logprobs, self._n_chars = [], [], [], 0


def replay(
    answer: StoredAnswer, now_s: float, *, state: CacheState = "hit-exact", similarity: float | None = None
) -> tuple[Chunk, ...]:
    """Give a stored answer as the chunks of a stream. Nothing of it was computed now, and its usage says so."""
    origin = Origin(
        endpoint=answer.endpoint,
        reason="corrected" if answer.is_corrected else "stored",
        cache=state,
        age_s=age_s(answer.created_at_s, now_s),
        similarity=similarity,
    )
    last = len(answer.pieces) - 1
    return tuple(
        Chunk(
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            finish_reason="stop" if number == last else None,
            usage=_usage(answer) if number == last else None,
            timings=_NO_TIME if number == last else None,
            origin=origin if number == 0 else None,
            stopped_by=answer.stopped_by if number == last else "",
        )
        for number, piece in enumerate(answer.pieces)
    )


_NO_TIME: Final = Timings(queue_s=0.0, prefill_s=0.0, prefill_tokens=0, decode_s=0.0, decode_tokens=0, ttft_s=0.0)


def _usage(answer: StoredAnswer) -> Usage:
    return Usage(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.prompt_tokens,
    )
