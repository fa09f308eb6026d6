"""OpenAI's chat and text completions: wire request → GenerateRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeVar, cast, get_args

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt import types
from edge_rt.api import choices, schemas
from edge_rt.api import tools as wire_tools
from edge_rt.api.adapters import read_adapters
from edge_rt.api.answers import ChatShape, CompletionShape, Generation, Shape, new_id
from edge_rt.api.choices import Plan, plan
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.formats import response_format
from edge_rt.api.schemas import ChatRequest, CompletionRequest, WireMessage
from edge_rt.cache.admission import wishes
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.router.decide import Decision
from edge_rt.router.rules import REASONS
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Message, Sampling, goes_on

_ROLES: Final[dict[str, Literal["system", "user", "assistant", "tool"]]] = {
    "system": "system",
    "developer": "system",  # what newer clients call it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


N = TypeVar("N", bound=str)


def chat_request(wire: ChatRequest, *, request_id: str, model: str, tenant: str) -> GenerateRequest:
    """Translate a chat request. Raises InvalidRequestError or UnsupportedFeatureError."""
    max_tokens = wire.max_completion_tokens
    if wire.max_tokens is not None:
        if max_tokens not in (None, wire.max_tokens):
            raise InvalidRequestError(param="max_tokens", problem="differs from max_completion_tokens; give one")
        max_tokens = wire.max_tokens
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequestError(param="top_logprobs", problem="needs logprobs to be true")
    schemas.refuse_unsupported(wire)
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(wire.messages))
    _check_results(messages)
    top_logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    tools = wire_tools.tools(wire.tools)
    choice, name = wire_tools.tool_choice(wire.tool_choice, has_tools=bool(tools))
    asked = _request(
        wire, request_id, model, tenant, max_tokens=max_tokens, top_logprobs=top_logprobs, messages=messages
    )
    asked = replace(asked, continues=_continues(wire, messages))
    if not tools:
        return asked
    parallel = wire.parallel_tool_calls is not False
    return replace(asked, tools=tools, tool_choice=choice, tool_name=name, parallel_tool_calls=parallel)


def _continues(wire: ChatRequest, messages: Sequence[Message]) -> bool:
    """Tell whether the answer goes on with the last message, by either of vLLM's fields where one is there."""
    continues, begins = wire.continue_final_message, wire.add_generation_prompt
    if continues is None:
        return goes_on(messages) if begins is None else not begins
    if begins is continues:
        problem = f"must be {str(not continues).lower()} where the answer "
        problem += "goes on with the last message" if continues else "begins anew"
        raise InvalidRequestError(param="add_generation_prompt", problem=problem)
    return continues


def completion_requests(
    wire: CompletionRequest, *, request_id: str, model: str, tenant: str
) -> tuple[GenerateRequest, ...]:
    """Translate a text completion, one request a prompt: a string, a list of token ids, or a list of these.

    With echo and logprobs the prompt's own are asked for, as many as the answer's. A prompt that is echoed alone
    (max_tokens 0) is computed too, for its usage.
    """
    schemas.refuse_unsupported(wire)
    prompts: list[str | list[int]] = []
    given = wire.prompt
    if isinstance(given, str):
        prompts.append(given)
    elif all(isinstance(item, int) for item in given):  # an empty list too, which is refused as such
        prompts.append(cast("list[int]", given))
    else:
        for i, item in enumerate(given):
            if isinstance(item, int):
                problem = "is a token id between prompts; give one list of token ids, or a list of prompts"
                raise InvalidRequestError(param=f"prompt[{i}]", problem=problem)
            prompts.append(item)
    echoed = wire.logprobs if wire.logprobs is not None or wire.max_tokens != 0 else 0
    asked = _request(wire, request_id, model, tenant, max_tokens=wire.max_tokens, top_logprobs=wire.logprobs)
    if wire.echo:
        if asked.beams is not None:
            raise InvalidRequestError(param="echo", problem="does not go with a beam search; leave it out")
        asked = replace(asked, prompt_logprobs=echoed)
    return tuple(
        replace(asked, prompt=prompt) if isinstance(prompt, str) else replace(asked, prompt_token_ids=tuple(prompt))
        for prompt in prompts
    )


def _request(
    wire: ChatRequest | CompletionRequest,
    request_id: str,
    model: str,
    tenant: str,
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
    messages: tuple[Message, ...] | None = None,
) -> GenerateRequest:
    if wire.stream_options is not None:
        if not wire.stream:
            raise InvalidRequestError(param="stream_options", problem="needs stream to be true")
        schemas.refuse_unsupported(wire.stream_options, "stream_options.")
    beams = choices.beams(wire, wire.n)
    return GenerateRequest(
        id=request_id,
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        sampling=_sampling(wire) if beams is None else Sampling(seed=wire.seed),
        beams=beams,
        ignore_eos=bool(wire.ignore_eos),
        stream=bool(wire.stream),
        top_logprobs=top_logprobs,
        max_draft=wire.max_draft,
        tenant=tenant,
        deadline_s=wire.deadline_s,
        response_format=response_format(wire),
    )


def with_wishes(
    asked: GenerateRequest, headers: Headers, wire: ChatRequest | CompletionRequest | None = None
) -> GenerateRequest:
    """Add where the request wants to be answered, how urgent it is and what it asks of the cache: x-edge-route,
    x-edge-priority and Cache-Control, or its own fields route, priority and cache. Raises InvalidRequestError where
    header and field differ.

    wire  None: other protocols have the headers only
    """
    route, priority, given_options = (None, None, None) if wire is None else (wire.route, wire.priority, wire.cache)
    route = _named(headers, "x-edge-route", get_args(types.Route), "route", route)
    priority = _named(headers, "x-edge-priority", get_args(types.Priority), "priority", priority)
    if priority is not None:
        asked = replace(asked, priority=priority)
    options = given_options or schemas.CacheOptions()
    control = ", ".join(headers.getlist("cache-control"))
    if not control and given_options is None and route is None:
        return asked
    return replace(
        asked,
        route=route or "auto",
        cache=wishes(control, sampled=options.sampled, tags=tuple(options.tags)),
    )


def _named(headers: Headers, header: str, values: tuple[N, ...], field: str, given: N | None) -> N | None:
    """Give what a header, or else the field beside it, says."""
    said = {value.strip().lower() for value in headers.getlist(header)}
    named = next(iter(said), None)
    if len(said) > 1:
        raise InvalidRequestError(param=header, problem=f"is there with {len(said)} values; give one")
    if named is not None and named not in values:
        raise InvalidRequestError(param=header, problem=f"must be one of {', '.join(values)}, got {named[:40]!r}")
    if named is not None and given not in (None, named):
        raise InvalidRequestError(param=field, problem=f"differs from the header {header} ({named}); give one")
    return next((value for value in values if value == named), given)


def wire_decision(decision: Decision) -> schemas.WireDecision:
    return schemas.WireDecision(
        where=decision.where, reason=decision.reason, why=REASONS[decision.reason], lines=list(decision.lines)
    )


def _sampling(wire: ChatRequest | CompletionRequest) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=given(wire.temperature, CHAT_SAMPLING.temperature),
        top_k=CHAT_SAMPLING.top_k if wire.top_k is None else wire.top_k,
        top_p=given(wire.top_p, CHAT_SAMPLING.top_p),
        min_p=given(wire.min_p, CHAT_SAMPLING.min_p),
        repeat_penalty=given(wire.repeat_penalty, 1.0),
        repeat_last_n=64 if wire.repeat_last_n is None else wire.repeat_last_n,
        presence_penalty=given(wire.presence_penalty, 0.0),
        frequency_penalty=given(wire.frequency_penalty, 0.0),
        seed=wire.seed,
        logit_bias=wire.logit_bias or {},
    )


def _message(message: WireMessage, place: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        if message.role == "function":
            raise UnsupportedFeatureError(feature=f"{place}.role", remedy="send results with role tool")
        raise InvalidRequestError(
            param=f"{place}.role", problem=f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
        )
    schemas.refuse_unsupported(message, f"{place}.")
    if role == "tool":
        if not message.tool_call_id:
            raise InvalidRequestError(param=f"{place}.tool_call_id", problem="is required: it names the call answered")
    elif message.tool_call_id is not None:
        raise InvalidRequestError(param=f"{place}.tool_call_id", problem="is for messages with role tool")
    elif message.name is not None:
        raise UnsupportedFeatureError(feature=f"{place}.name", remedy="leave it out")
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(param=f"{place}.tool_calls", problem="are for messages with role assistant")
    return Message(
        role=role,
        content=_content(message, place),
        tool_calls=wire_tools.calls(message.tool_calls, f"{place}.tool_calls"),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _content(message: WireMessage, place: str) -> str:
    if message.content is None:
        if message.tool_calls:
            return ""
        raise InvalidRequestError(param=f"{place}.content", problem="null is not text; send a string or text parts")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise UnsupportedFeatureError(
                feature=f"{place}.content[{i}].type", remedy=f"send parts of type text, not {part.type[:40]}"
            )
        schemas.refuse_unsupported(part, f"{place}.content[{i}].")
        if part.text is None:
            raise InvalidRequestError(param=f"{place}.content[{i}].text", problem="is required")
        texts.append(part.text)
    return "\n".join(texts)  # llama-server joins them so


def _check_results(messages: Sequence[Message]) -> None:
    """Refuse a result that answers no call before it."""
    called: set[str] = set()
    for i, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in called:
            problem = f"{message.tool_call_id[:80]!r} is no call of an assistant's message before it"
            raise InvalidRequestError(param=f"messages[{i}].tool_call_id", problem=problem)


def routes(api: Api) -> list[Route]:
    """Give the endpoints; each returns an ASGI app that answers."""

    async def chat(request: Request) -> ASGIApp:
        wire = schemas.decode(await read_body(request, api), ChatRequest)
        shape = ChatShape()
        asked = chat_request(
            wire, request_id=new_id(shape), model=api.model_id(wire.model), tenant=request.state.tenant
        )
        asked = _adapted(api, with_wishes(asked, request.headers, wire), wire)
        return _answer(api, plan([asked], n=wire.n, max_choices=api.config.limits.max_choices), shape, wire)

    async def completions(request: Request) -> ASGIApp:
        wire = schemas.decode(await read_body(request, api), CompletionRequest)
        shape = CompletionShape()
        asked = completion_requests(
            wire, request_id=new_id(shape), model=api.model_id(wire.model), tenant=request.state.tenant
        )
        planned = plan(
            [_adapted(api, with_wishes(each, request.headers, wire), wire) for each in asked],
            n=wire.n,
            best_of=wire.best_of,
            echo=bool(wire.echo),
            max_choices=api.config.limits.max_choices,
        )
        return _answer(api, planned, shape, wire)

    async def explain(request: Request) -> ASGIApp:
        """Tell where a chat request would be answered, without answering it."""
        wire = schemas.decode(await read_body(request, api), ChatRequest)
        asked = chat_request(
            wire, request_id=new_id(ChatShape()), model=api.model_id(wire.model), tenant=request.state.tenant
        )
        decision = api.runtime.explain(_adapted(api, with_wishes(asked, request.headers, wire), wire))
        return Response(schemas.encode(wire_decision(decision)), media_type="application/json")

    async def feedback(request: Request) -> ASGIApp:
        """Take whether an answer was good enough, for the router to learn from."""
        wire = schemas.decode(await read_body(request, api), schemas.FeedbackRequest)
        api.runtime.feedback(wire.id, request.state.tenant, is_good=wire.good)
        return Response(status_code=204)

    return [
        Route("/v1/feedback", Endpoint(feedback), methods=["POST"]),
        Route("/v1/route/explain", Endpoint(explain), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(chat), methods=["POST"]),
        Route("/v1/completions", Endpoint(completions), methods=["POST"]),
    ]


def _adapted(api: Api, asked: GenerateRequest, wire: ChatRequest | CompletionRequest) -> GenerateRequest:
    model, adapters = read_adapters(asked.model, wire.lora, api.adapters)
    return replace(asked, model=model, adapters=adapters) if adapters or model != asked.model else asked


def _answer(api: Api, asked: Plan, shape: Shape, wire: ChatRequest | CompletionRequest) -> Generation:
    include_usage = wire.stream_options is not None and wire.stream_options.include_usage
    return Generation(api, asked, shape, include_usage=include_usage)
