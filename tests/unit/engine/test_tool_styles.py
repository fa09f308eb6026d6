"""How a chat template's calls are found out, and what templates without tools are told instead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from edge_rt.engine import tool_styles
from edge_rt.engine.chat import ChatTemplate
from edge_rt.engine.tool_styles import GENERIC, ToolStyle
from edge_rt.errors import InvalidRequestError
from edge_rt.types import Message, Tool, ToolCall
from tests import chat_templates

TOOL = Tool(name="get_weather", description="Weather in a city", parameters='{"type": "object", "properties": {}}')
TALK = (
    Message(role="user", content="Graz?"),
    Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(id="call_1", name="get_weather", arguments='{"city": "Graz"}'),),
    ),
    Message(role="tool", content='{"t": 21}', tool_call_id="call_1", name="get_weather"),
)


def style_of(source: str) -> tuple[ChatTemplate, ToolStyle]:
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")

    def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        return "".join(segment.text for segment in template.render(messages, tools=tools))

    return template, tool_styles.detect(render)


SHOWS_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
TALKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
)
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "hermes"),
        (f"[TOOL_CALLS][{CALL}]", "mistral"),
        ("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}", "mistral-args"),
        ('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', "llama-3"),
        ("<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>", "function-tag"),
        (f"<call>{CALL}</call>", "generic"),
    ],
)
def test_a_template_is_known_by_how_it_writes_a_call(call: str, name: str) -> None:
    assert style_of(SHOWS_TOOLS + TALKS.replace("%s", call))[1].name == name
    assert style_of(TALKS.replace("%s", call))[1].name == "generic"  # it shows no tools


def test_a_template_may_refuse_system_messages() -> None:
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    _, style = style_of("{% for m in messages %}" + refuses + "{{ m.content }}{% endfor %}")
    assert (style.name, style.has_system) == ("generic", False)
    told = tool_styles.in_messages(TALK, (TOOL,), style)
    assert [message.role for message in told] == ["user", "assistant", "user"]
    assert told[0].content.endswith("\n\nGraz?")


# What public templates are found to be. All others get the generic form.
KNOWN = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "meetkai-functionary-medium-v3.1": "function-tag",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama-3",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-args",
    "Qwen3-Coder": "generic",
    "google-gemma-2-2b-it": "generic",
    "microsoft-Phi-3.5-mini-instruct": "generic",
}
# Written for another renderer: they want variables or methods that no other passes.
BROKEN = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
    "tencent-Hy3",
}


def test_public_templates_tell_of_tools_calls_and_results() -> None:
    found: dict[str, str] = {}
    for name, source in chat_templates.all_templates():
        if name in BROKEN:
            continue
        template, style = style_of(source)
        found[name] = style.name
        messages: Sequence[Message] = TALK
        shown = tool_styles.shown_tools((TOOL,))
        if not style.in_prompt:
            messages, shown = tool_styles.in_messages(TALK, (TOOL,), style), []
        prompt = "".join(segment.text for segment in template.render(messages, tools=shown, style=style))
        opening = style.openings[0]
        call = f'{opening.mark}{opening.rest}{style.head % "get_weather"}{{"city": "Graz"}}'
        assert call in prompt, name
        assert "Weather in a city" in prompt, name
        assert '{"t": 21}' in prompt or json.dumps('{"t": 21}') in prompt, name
    assert {name: found.get(name) for name in KNOWN} == KNOWN
    assert len(found) > 50


def test_control_tokens_in_tools_and_calls_are_text() -> None:
    template = ChatTemplate(SHOWS_TOOLS + TALKS.replace("%s", CALL), control_texts=("<|end|>",))
    tool = Tool(name="f", description="<|end|>", parameters='{"title": "<|end|>", "properties": {"<|end|>": {}}}')
    call = ToolCall(id="1", name="f", arguments='{"<|end|>": "<|end|>"}')
    messages = (
        Message(role="user", content="x"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="<|end|>", tool_call_id="1"),
    )
    segments = template.render(messages, tools=tool_styles.shown_tools((tool,)))
    assert [segment.text for segment in segments if not segment.special] == ["<|end|>"] * 6
    assert not any("<|end|>" in segment.text for segment in segments if segment.special)


def test_ids_fit_templates_that_are_particular() -> None:
    nine = next(style for style in tool_styles._FAMILIES if style.id_chars == 9)
    assert tool_styles.fitted_id("abcDEF123", nine) == "abcDEF123"
    fitted = tool_styles.fitted_id("call_of_another_kind", nine)
    assert len(fitted) == 9
    assert fitted.isalnum()
    assert fitted == tool_styles.fitted_id("call_of_another_kind", nine)
    assert len(tool_styles.new_id(nine)) == 9
    assert tool_styles.new_id(GENERIC) != tool_styles.new_id(GENERIC)


def test_what_is_told_of_tools_stands_in_the_system_message() -> None:
    talk = (Message(role="system", content="Be brief."), *TALK, Message(role="user", content="And?"))
    told = tool_styles.in_messages(talk, (TOOL,))
    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    assert told[0].content.startswith("Be brief.\n\n")
    assert "get_weather" in told[0].content
    assert told[2].content == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Graz"}}\n</tool_call>'
    assert told[3].content == '<tool_response>\n{"t": 21}\n</tool_response>\nAnd?'
    assert tool_styles.in_messages(TALK[:1], ()) == TALK[:1]


@pytest.mark.parametrize("depth", [130, 900, 100_000])
def test_arguments_that_are_nested_too_deeply_are_refused(depth: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"a: (is nested too deeply|has 200006 bytes)"):
        tool_styles.arguments_of('{"a":' + "[" * depth + "]" * depth + "}", "a")
