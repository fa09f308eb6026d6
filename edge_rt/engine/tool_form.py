"""Hold an answer's tool calls to their tools' schemas, from where the model begins one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from edge_rt.engine.grammar import Constraint, Grammars
from edge_rt.engine.sampling import Allowed
from edge_rt.engine.tool_styles import ToolStyle
from edge_rt.engine.tool_text import Openings


class ToolForm:
    """A Form that leaves the answer to the model until calls begin, and holds what follows to their grammar.

    calls  the grammar, from the opening on
    shown  control tokens that stand for themselves in the style's marks

    The token that completes an opening may bring text behind it that no call begins with. Then the opening is completed
    by other tokens, and the text behind it is chosen anew.
    """

    def __init__(
        self,
        style: ToolStyle,
        calls: Constraint,
        grammars: Grammars,
        piece: Callable[..., bytes],
        *,
        shown: Collection[int],
    ) -> None:
        self._calls = calls
        self._grammars = grammars
        self._piece = piece
        self._shown = shown
        # One character for each byte: marks are ASCII, and tokens may end within a character.
        self._openings = Openings([opening.mark for opening in style.openings], at_start=style.at_start)
        self._is_open = False

    @property
    def allowed(self) -> Allowed | None:
        return self._calls if self._is_open else None

    @property
    def is_whole(self) -> bool:
        return self._is_open and self._calls.is_whole

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        return self._calls.n_allowed(token_ids) if self._is_open else len(token_ids)

    def take(self, token_id: int, *, forces: bool) -> list[int]:
        if self._is_open:
            return self._calls.take(token_id, forces=forces)
        raw = self._piece(token_id, special=token_id in self._shown)
        _, mark, rest = self._openings.look(raw.decode("latin-1"))
        if mark is None:
            return [token_id]
        self._is_open = True
        taken = [token_id]
        if token_id in self._shown:
            self._calls.skip([token_id])
        else:
            self._calls.skip(self._grammars.token_ids(mark.encode()))
            behind = self._grammars.token_ids(rest.encode("latin-1"))
            if self._calls.n_allowed(behind) == len(behind):
                self._calls.skip(behind)
            else:
                taken = self._grammars.token_ids(raw[: len(raw) - len(rest)])
        return [*taken, *self._calls.force()] if forces else taken
