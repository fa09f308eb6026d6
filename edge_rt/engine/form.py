"""What a request's answer must look like, as the step loop asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge_rt.backends.base import TokenSession
from edge_rt.engine import grammar_text
from edge_rt.engine.grammar import Grammars
from edge_rt.engine.sampling import Allowed
from edge_rt.errors import InvalidRequestError
from edge_rt.types import GenerateRequest


class Form(Protocol):
    """One answer's form. allowed and take raise InvalidRequestError for one that takes too much."""

    @property
    def allowed(self) -> Allowed | None:
        """What may come next; None where that is left to the model."""
        ...

    @property
    def is_whole(self) -> bool:
        """Say whether nothing can follow what was taken but the end."""
        ...

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        """Count how many of these may come next, one after the other. Never raises."""
        ...

    def take(self, token_id: int, *, forces: bool) -> list[int]:
        """Move past a token; give it, and with forces those after it that leave no choice."""
        ...


class Forms:
    """The forms of one session's answers. Any thread may ask."""

    def __init__(self, session: TokenSession) -> None:
        self._grammars = Grammars(session)

    def of(self, request: GenerateRequest) -> Form | None:
        """Prepare what a request wants its answer to look like; None leaves it to the model.

        The first request for a form takes half a second, and the first for each grammar some milliseconds. Raises
        InvalidRequestError and UnsupportedFeatureError.
        """
        form = request.response_format
        if form is None:
            return None
        if request.stop:
            raise InvalidRequestError(
                param="stop", problem="would cut an answer that has a form; leave one of them out"
            )
        self._grammars.check_present()
        param = grammar_text.PARAM[form.kind]
        return self._grammars.compile(grammar_text.of_format(form), param, ignores_eos=request.ignore_eos)
