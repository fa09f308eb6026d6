"""Turn a conversation into a prompt with the model's own chat template."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from edge_rt.engine.meter import LimitError, Meter
from edge_rt.engine.sandbox import RaisedByTemplateError, TemplateSandbox
from edge_rt.engine.tool_styles import GENERIC, ToolStyle, arguments_of, fitted_id
from edge_rt.errors import InvalidRequestError, ModelFormatError, UnsupportedFeatureError
from edge_rt.types import Message

_FIELD = "tokenizer.chat_template"
_TOKENS_FIELD = "tokenizer.ggml.tokens"
# Plane 16 is for private use: no tokenizer has a token for these and templates never look for them.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt. special says whether control tokens written in it are to be parsed."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What a chat template may spend; the sizes that grow with the conversation are n + m for each of its characters.

    The largest public templates have some 17 thousand characters, which make about 2 thousand syntax nodes.
    """

    max_source_chars: int = 65_536
    max_nodes: int = 8_192
    max_time_s: float = 1.0
    max_output_chars: int = 262_144
    max_output_per_char: int = 4
    max_work_chars: int = 8_388_608
    max_work_per_char: int = 64
    max_control_chars: int = 262_144


class ChatTemplate:
    """One model's chat template, compiled once.

    source         the Jinja text, None for a model that has none
    origin         the model or file it comes from, for errors
    control_texts  the text of every control token of the vocabulary
    clock          seconds of CPU time of the calling thread
    now            what strftime_now shows

    Raises ModelFormatError for a template or control tokens that do not compile or are too large.

    A control token written in a message is text that the user typed, so it may not act as one: it comes back in a
    segment of its own with special off. While the template runs, a private-use character that occurs nowhere else
    stands in for it; trimming, splitting and searching leave that alone, and the template cannot be tricked into
    moving or repairing the token. All other text stays one segment, so that its token ids are those of tokenizing
    the prompt as a whole.
    """

    def __init__(
        self,
        source: str | None,
        *,
        origin: str = "this model",
        bos_text: str = "",
        eos_text: str = "",
        control_texts: Collection[str] = (),
        limits: TemplateLimits = TemplateLimits(),
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).astimezone(),
    ) -> None:
        self._origin = origin
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._limits = limits
        self._control = self._compile_control(control_texts)
        self._clock = clock
        self._lock = Lock()
        self._sandbox = TemplateSandbox(self._meter(0), now=now)
        self._own_marks = set(_MARK.findall(source or ""))
        self._template = None if source is None else self._compile(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        style: ToolStyle = GENERIC,
        add_generation_prompt: bool = True,
        answer: str = "",
    ) -> tuple[Segment, ...]:
        """Write the prompt.

        tools, style  as tool_styles says; a template that shows no tools gets plain messages
        answer        how the model's answer begins: it comes as it is after all that the template writes

        Raises UnsupportedFeatureError for a model without a template, InvalidRequestError where the template refuses
        the messages, ModelFormatError where it fails or exceeds its limits.
        """
        if self._template is None:
            raise UnsupportedFeatureError(
                feature=f"chat with {self._origin}, whose file has no chat template,",
                remedy="send a plain prompt, or give the model's manifest a chat_template",
            )
        if not messages:
            raise InvalidRequestError(param="messages", problem="there is none; send at least one message")
        shown = [_shown(message, style, f"messages[{i}]") for i, message in enumerate(messages)]
        texts = [*_texts(shown), *_texts(list(tools)), answer]
        marks = self._marks(texts)
        if marks and (control := self._control) is not None:

            def hide(text: str) -> str:
                return control.sub(lambda match: marks[match[0]], text)

            shown, tools, answer = _mapped(shown, hide), _mapped(list(tools), hide), hide(answer)
        with self._lock:
            prompt = self._run(
                self._template,
                shown,
                tools,
                n_chars=sum(map(len, texts)),
                add_generation_prompt=add_generation_prompt,
            )
        return _split(prompt + answer, {mark: text for text, mark in marks.items()})

    def _compile_control(self, texts: Collection[str]) -> re.Pattern[str] | None:
        n_chars = sum(map(len, texts))
        if n_chars > self._limits.max_control_chars:
            problem = f"control tokens of {n_chars} characters, the limit is {self._limits.max_control_chars}"
            raise ModelFormatError(path=self._origin, field=_TOKENS_FIELD, problem=problem)
        try:
            return _any_of(texts)
        except RecursionError as exc:
            problem = "control tokens that are beginnings of each other, hundreds deep"
            raise ModelFormatError(path=self._origin, field=_TOKENS_FIELD, problem=problem) from exc

    def _compile(self, source: str) -> Template:
        if len(source) > self._limits.max_source_chars:
            raise self._bad(f"has {len(source)} characters, the limit is {self._limits.max_source_chars}")
        try:
            tree = self._sandbox.parse(source)
            self._sandbox.check(tree, self._limits.max_nodes)
            return self._sandbox.from_string(tree)
        except TemplateSyntaxError as exc:
            raise self._bad(f"line {exc.lineno}: {exc.message}") from exc
        except RecursionError as exc:
            raise self._bad("is nested too deeply") from exc
        except Exception as exc:
            # Jinja and Python's compiler between them raise nearly anything on text made to break them.
            raise self._bad(str(exc) or type(exc).__name__) from exc

    def _run(
        self,
        template: Template,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        n_chars: int,
        add_generation_prompt: bool,
    ) -> str:
        max_output_chars = self._limits.max_output_chars + self._limits.max_output_per_char * n_chars
        self._sandbox.use(self._meter(n_chars))
        parts: list[str] = []
        try:
            for part in template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_text,
                eos_token=self._eos_text,
                # The hub always passes these two, and templates compare them with none.
                tools=tools or None,
                documents=None,
            ):
                parts.append(part)
                max_output_chars -= len(part)
                if max_output_chars < 0:
                    raise LimitError("writes a prompt far longer than the messages")
        except RaisedByTemplateError as exc:
            raise InvalidRequestError(param="messages", problem=f"the model's chat template says: {exc}") from exc
        except RecursionError as exc:
            raise self._bad("recurses too deeply") from exc
        except Exception as exc:
            # A template is code: whatever it raises is its author's mistake, told as such.
            raise self._bad(f"{type(exc).__name__}: {exc}") from exc
        finally:
            self._sandbox.use(self._meter(0))  # the spent one holds on to the conversation
        return "".join(parts)

    def _meter(self, n_chars: int) -> Meter:
        limits = self._limits
        return Meter(
            max_chars=limits.max_work_chars + limits.max_work_per_char * n_chars,
            max_time_s=limits.max_time_s,
            clock=self._clock,
        )

    def _bad(self, problem: str) -> ModelFormatError:
        return ModelFormatError(path=self._origin, field=_FIELD, problem=problem[:500])

    def _marks(self, contents: Sequence[str]) -> dict[str, str]:
        """Choose a stand-in for each control text that the contents hold."""
        if self._control is None:
            return {}
        found = dict.fromkeys(match[0] for content in contents for match in self._control.finditer(content))
        if not found:
            return {}
        taken = {mark for content in contents for mark in _MARK.findall(content)} | self._own_marks
        free = (mark for mark in map(chr, range(_FIRST_MARK, _LAST_MARK + 1)) if mark not in taken)
        marks = dict(zip(found, free, strict=False))
        if len(marks) < len(found):
            raise InvalidRequestError(param="messages", problem="private-use characters and control tokens are mixed")
        return marks


def _shown(message: Message, style: ToolStyle, place: str) -> dict[str, Any]:
    """Give a message as templates expect it: fields that say nothing are not there, arguments are an object."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": fitted_id(call.id, style),
                "function": {
                    "name": call.name,
                    "arguments": arguments_of(call.arguments, f"{place}.tool_calls[{i}].function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        shown["tool_call_id"] = fitted_id(message.tool_call_id, style)
        if message.name:
            shown["name"] = message.name
    return shown


def _texts(value: Any) -> Iterator[str]:
    """Give every text that a client wrote somewhere in a value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(item, change) for name, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Compile a pattern for the longest of the texts at each place, as fast for thousands as for a few.

    Vocabularies have thousands of control tokens with a common beginning; a plain alternation would try each of them
    at every "<" that a user types. Branches that begin with different characters are told apart by one look.
    """
    tree: dict[str, Any] = {}
    for text in filter(None, texts):
        branch = tree
        for char in text:
            branch = branch.setdefault(char, {})
        branch[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(branch: dict[str, Any]) -> str:
    stem = ""
    while len(branch) == 1 and "" not in branch:
        char, branch = next(iter(branch.items()))
        stem += re.escape(char)
    ends = "" in branch
    choices = [re.escape(char) + _pattern(rest) for char, rest in sorted(branch.items()) if char]
    if not choices:
        return stem
    return f"{stem}(?:{'|'.join(choices)}){'?' if ends else ''}"


def _split(prompt: str, texts: dict[str, str]) -> tuple[Segment, ...]:
    """Cut a prompt at its marks and put the control texts they stand for in their place."""
    if not texts:
        return (Segment(prompt, special=True),)
    segments: list[Segment] = []
    for part in re.split(f"([{''.join(texts)}]+)", prompt):
        if part and part[0] in texts:
            segments.append(Segment("".join(texts[mark] for mark in part), special=False))
        elif part:
            segments.append(Segment(part, special=True))
    return tuple(segments)
