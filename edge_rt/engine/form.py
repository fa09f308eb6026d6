"""What a request's answer must look like, as the step loop asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edge_rt.backends.base import TokenSession
from edge_rt.engine import grammar_text, tool_styles
from edge_rt.engine.grammar import Grammars
from edge_rt.engine.sampling import Allowed
from edge_rt.engine.text import TextStream
from edge_rt.engine.tool_form import ToolForm
from edge_rt.engine.tool_styles import GENERIC, ToolStyle
from edge_rt.engine.tool_text import ToolText
from edge_rt.errors import InvalidRequestError, RequestError, UnsupportedFeatureError
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
    """The forms of one session's answers. Any thread may ask.

    style  says how the model's tool calls are written
    """

    def __init__(self, session: TokenSession, style: Callable[[], ToolStyle] = lambda: GENERIC) -> None:
        self._session = session
        self._style = style
        self._grammars = Grammars(session)

    @property
    def kept_bytes(self) -> int:
        """Memory of compiled grammars that are kept for other requests."""
        return self._grammars.kept_bytes

    def of(self, request: GenerateRequest) -> tuple[Form | None, TextStream]:
        """Prepare what a request wants its answer to look like, None where that is left to the model, and its reader.

        The first request for a form takes half a second, and the first for each grammar some milliseconds. Raises
        InvalidRequestError and UnsupportedFeatureError.
        """
        form = request.response_format
        if request.tools and request.tool_choice != "none":
            return self._with_tools(request)
        text = TextStream(self._session.piece, request.stop)
        if form is None:
            return None, text
        _refuse_stop(request)
        self._grammars.check_present()
        param = grammar_text.PARAM[form.kind]
        grammar = grammar_text.of_format(form)
        constraint = self._grammars.compile(grammar, param, tenant=request.tenant, ignores_eos=request.ignore_eos)
        return constraint, text

    def _with_tools(self, request: GenerateRequest) -> tuple[Form, TextStream]:
        if request.messages is None:
            raise InvalidRequestError(param="tools", problem="go with messages, not with a plain prompt")
        session, tools = self._session, request.tools
        tool_styles.check_tools(tools, request.tool_name)
        self._grammars.check_present()
        must_call = request.tool_choice == "required" or bool(request.tool_name)
        otherwise = None if must_call else request.response_format
        if otherwise is not None:
            _refuse_stop(request)
            if otherwise.kind == "grammar":
                raise UnsupportedFeatureError(feature="a GBNF grammar beside tools", remedy="leave one of them out")
        style = self._style()
        grammar = tool_styles.grammar(
            style,
            tools,
            self._control_token,
            parallel=request.parallel_tool_calls,
            tool_name=request.tool_name,
            otherwise=otherwise,
        )
        try:
            calls = self._grammars.compile(grammar, "tools", tenant=request.tenant, ignores_eos=request.ignore_eos)
        except RequestError:
            self._find_broken(request)
            raise
        at_start = must_call or otherwise is not None
        shown = frozenset(filter(None, map(self._control_token, tool_styles.marks(style))))
        text = ToolText(
            session.piece,
            request.stop,
            style=style,
            names=[tool.name for tool in tools],
            new_id=lambda: tool_styles.new_id(style),
            shown=shown,
            at_start=at_start,
        )
        form = calls if at_start else ToolForm(style, calls, self._grammars, session.piece, shown=shown)
        return form, text

    def _find_broken(self, request: GenerateRequest) -> None:
        """Raise the error of the first of a request's schemas that is none by itself."""
        for i, tool in enumerate(request.tools):
            rule = grammar_text.json_rule(tool_styles.parameters(tool, i))
            self._grammars.compile(f"start: {rule}\n", tool_styles.param_of(i), tenant=request.tenant)
        if (form := request.response_format) is not None:
            grammar = grammar_text.of_format(form)
            self._grammars.compile(grammar, grammar_text.PARAM[form.kind], tenant=request.tenant)

    def _control_token(self, text: str) -> int | None:
        if text not in self._session.vocab.control_texts:
            return None
        token_ids = self._session.tokenize(text, special=True)
        return token_ids[0] if len(token_ids) == 1 and not self._session.piece(token_ids[0]) else None


def _refuse_stop(request: GenerateRequest) -> None:
    if request.stop:
        raise InvalidRequestError(param="stop", problem="would cut an answer that has a form; leave one out")
