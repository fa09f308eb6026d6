"""Read an answer that may hold tool calls, token by token: what is text, and what belongs to a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from edge_rt.engine.text import TextStream
from edge_rt.engine.tool_styles import ToolStyle
from edge_rt.types import ToolCallDelta


class Openings:
    """Look for the beginning of calls in a text that comes piece by piece.

    at_start  they begin at the answer's start or not at all; white space may come before
    """

    def __init__(self, marks: Sequence[str], *, at_start: bool) -> None:
        self._marks = marks
        self._at_start = at_start
        self._held = ""
        self._is_over = False

    def look(self, text: str) -> tuple[str, str | None, str]:
        """Take a piece of text.

        returns the text that is no part of an opening, the mark if one is complete now, and what follows that. While
        an opening may follow, its beginning is held back.
        """
        if self._is_over:
            return text, None, ""
        data = self._held + text
        if self._at_start:
            return self._at_beginning(data)
        found = min(((at, mark) for mark in self._marks if (at := data.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            self._held, self._is_over = "", True
            return data[:at], mark, data[at + len(mark) :]
        n_held = next(
            n
            for n in range(min(max(map(len, self._marks)) - 1, len(data)), -1, -1)
            if not n or any(mark.startswith(data[-n:]) for mark in self._marks)
        )
        self._held = data[len(data) - n_held :]
        return data[: len(data) - n_held], None, ""

    def _at_beginning(self, data: str) -> tuple[str, str | None, str]:
        begun = data.lstrip()
        for mark in self._marks:
            if begun.startswith(mark):
                self._held, self._is_over = "", True
                return "", mark, begun[len(mark) :]
        if any(mark.startswith(begun) for mark in self._marks):
            self._held = data
            return "", None, ""
        self._held, self._is_over = "", True
        return data, None, ""

    def rest(self) -> str:
        """Give what is held back, at the answer's end."""
        held, self._held = self._held, ""
        return held


class ToolText(TextStream):
    """One answer's text and calls.

    piece     a token's bytes; with special those of a control token too
    shown     control tokens that are written as text here, because the style is made of them
    stop      strings that end the answer, in its text only
    names     of the tools that may be called
    new_id    makes a call's id
    at_start  calls begin at the answer's start or not at all
    """

    def __init__(
        self,
        piece: Callable[..., bytes],
        stop: tuple[str, ...],
        *,
        style: ToolStyle,
        names: Collection[str],
        new_id: Callable[[], str],
        shown: Collection[int] = (),
        at_start: bool = False,
    ) -> None:
        def written(token_id: int) -> bytes:
            return piece(token_id, special=token_id in shown)

        super().__init__(written, stop)
        self._openings = Openings([opening.mark for opening in style.openings], at_start=at_start or style.at_start)
        self._rests = {opening.mark: opening.rest for opening in style.openings}
        self._heads = {style.head % name: name for name in names}
        self._between = style.tail + style.between
        self._new_id = new_id
        self._stage: Literal["text", "lead", "head", "arguments"] = "text"
        self._lead = ""  # what stands before the next call's head
        self._unread = ""
        self._arguments = _ObjectEnd()

    def flush(self) -> str:
        text = super().flush()
        if self._stage != "text" or self.stopped:
            return text
        return text + super()._take(self._openings.rest()) + self.release()

    def _take(self, text: str) -> str:
        if self._stage != "text":
            self._read_calls(text)
            return ""
        before, mark, after = self._openings.look(text)
        said = super()._take(before)
        if mark is not None and not self.stopped:
            said += self.release()  # what was held back for a stop string, which cannot go on within a call
            self._stage, self._lead = "lead", self._rests[mark]
            self._read_calls(after)
        return said

    def _read_calls(self, text: str) -> None:
        """Read on behind the opening. The answer's form lets nothing come that is not looked for here."""
        self._unread += text
        while self._unread:
            if self._stage == "lead":
                if not self._unread.startswith(self._lead):
                    return
                self._unread = self._unread[len(self._lead) :]
                self._stage = "head"
            elif self._stage == "head":
                head = next((head for head in self._heads if self._unread.startswith(head)), None)
                if head is None:
                    return
                self._unread = self._unread[len(head) :]
                self._deltas.append(ToolCallDelta(index=self.n_calls, id=self._new_id(), name=self._heads[head]))
                self.n_calls += 1
                self._stage, self._arguments = "arguments", _ObjectEnd()
            else:
                end = self._arguments.find(self._unread)
                part = self._unread[:end]
                self._deltas.append(ToolCallDelta(index=self.n_calls - 1, arguments=part))
                self._unread = self._unread[len(part) :]
                if end is None:
                    return
                self._stage, self._lead = "lead", self._between


class _ObjectEnd:
    """Find where a JSON object ends that comes piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Give the place behind the object's last brace if it is in this piece."""
        for at, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped = char == "\\"
                self._in_text = char != '"'
            elif char == '"':
                self._in_text = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None
