"""From a request to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from edge_rt.backends.base import TokenSession
from edge_rt.engine import tool_styles
from edge_rt.engine.chat import ChatTemplate, Segment
from edge_rt.engine.tool_styles import ToolStyle
from edge_rt.errors import ContextLengthError, InvalidRequestError
from edge_rt.types import GenerateRequest, Message, Tool


class PromptReader:
    """Renders and tokenises prompts for one session; any thread may call it.

    The template is compiled when the first chat asks for it.
    """

    def __init__(self, session: TokenSession) -> None:
        self._session = session
        self._template: ChatTemplate | None = None

    def read(self, request: GenerateRequest) -> list[int]:
        """Give the prompt's token ids: at least one, and fewer than the context holds.

        Control tokens written in a plain prompt are parsed, those written in a chat message are not. Raises
        RequestError, and ModelFormatError for a broken chat template.
        """
        token_ids = self.token_ids(request)
        n_ctx = self._session.caps.n_ctx
        if not token_ids:
            raise InvalidRequestError(param="prompt", problem="is empty: there is no token to continue from")
        if len(token_ids) >= n_ctx:
            raise ContextLengthError(prompt_tokens=len(token_ids), n_ctx=n_ctx)
        return token_ids

    def token_ids(self, request: GenerateRequest) -> list[int]:
        """Give the prompt's token ids, whatever the context holds. Raises as read does."""
        session = self._session
        if request.prompt_token_ids is not None:
            n_vocab = session.caps.n_vocab
            for token_id in request.prompt_token_ids:
                if not 0 <= token_id < n_vocab:
                    raise InvalidRequestError(
                        param="prompt", problem=f"token id {token_id} is outside the vocabulary of {n_vocab}"
                    )
            return list(request.prompt_token_ids)
        if request.messages is None:
            return session.tokenize(request.prompt or "", special=True, add_bos=True)
        ids: list[int] = []
        messages, answer = request.messages, ""
        if request.continues:
            messages, answer = messages[:-1], messages[-1].content
        for segment in self._segments(messages, () if request.tool_choice == "none" else request.tools, answer):
            ids += session.tokenize(segment.text, special=segment.special)
        if session.vocab.add_bos and ids[:1] != [session.vocab.bos_id]:
            ids.insert(0, session.vocab.bos_id)
        return ids

    @cached_property
    def tool_style(self) -> ToolStyle:
        """How this model's calls are written."""

        def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            return "".join(segment.text for segment in self._chat_template().render(messages, tools=tools))

        return tool_styles.detect(render)

    def _segments(self, messages: Sequence[Message], tools: Sequence[Tool], answer: str) -> tuple[Segment, ...]:
        template = self._chat_template()
        if not tools and not any(message.tool_calls or message.role == "tool" for message in messages):
            return template.render(messages, answer=answer)
        style = self.tool_style
        if not style.in_prompt:
            return template.render(tool_styles.in_messages(messages, tools, style), answer=answer)
        return template.render(messages, tools=tool_styles.shown_tools(tools), style=style, answer=answer)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            vocab = self._session.vocab
            self._template = ChatTemplate(
                vocab.chat_template,
                origin=self._session.info.model,
                bos_text=vocab.bos_text,
                eos_text=vocab.eos_text,
                control_texts=vocab.control_texts,
            )
        return self._template
