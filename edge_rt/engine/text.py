"""Turn tokens into text that may be sent at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from edge_rt.errors import InvalidRequestError
from edge_rt.types import ToolCallDelta


class TextStream:
    """One answer's text, in pieces that are whole characters and hold no part of a stop string.

    piece   a token's bytes, which may be a part of a character
    stop    strings that end the answer; the text from the first of them on is dropped

    The stop string that is complete first ends the answer, the longest of those that are complete at the same
    character; so where tokens begin and end makes no difference. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, piece: Callable[[int], bytes], stop: tuple[str, ...]) -> None:
        if "" in stop:
            raise InvalidRequestError(param="stop", problem="holds an empty string, which would end every answer")
        self._piece = piece
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = stop
        self._beginnings = frozenset(text[:n] for text in stop for n in range(1, len(text)))
        self._max_held = max(map(len, stop), default=1) - 1
        self._held = ""
        self.stopped_by = ""
        self.n_calls = 0  # a plain text has none
        self._deltas: list[ToolCallDelta] = []

    @property
    def stopped(self) -> bool:
        """Say whether a stop string has ended the answer."""
        return bool(self.stopped_by)

    def push(self, token_id: int) -> str:
        """Take the next token and give the text that it makes safe to send, often "" while a stop string may follow."""
        return self._take(self._decode(self._piece(token_id)))

    def flush(self) -> str:
        """Give what was held back, at the end of an answer that no stop string ended."""
        return self._take(self._decode(b"", True)) + self.release()

    def release(self) -> str:
        """Give what was held back, because no stop string can go on with what comes."""
        held, self._held = self._held, ""
        return held

    def take_calls(self) -> tuple[ToolCallDelta, ...]:
        """Give what was read of tool calls since the last time."""
        taken, self._deltas = tuple(self._deltas), []
        return taken

    @property
    def has_calls(self) -> bool:
        """Say whether there are any to take."""
        return bool(self._deltas)

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        if not text:
            return ""
        text = self._held + text
        if (found := self._answer_end(text)) is not None:
            end, self.stopped_by = found
            self._held = ""
            return text[:end]
        n_held = min(self._max_held, len(text))
        while n_held and text[-n_held:] not in self._beginnings:
            n_held -= 1
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def _answer_end(self, text: str) -> tuple[int, str] | None:
        """Find where the answer ends if a stop string is in the text, and which.

        What was sent before cannot be a part of it: a beginning of a stop string is never sent.
        """
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return None if found is None else found[1:]
