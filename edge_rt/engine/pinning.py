"""Pin a system prompt: the tokens that every talk with it begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edge_rt.engine.line import owner_of
from edge_rt.engine.prefix import common_prefix
from edge_rt.engine.prefix_tree import public_part
from edge_rt.engine.warm import WarmStart
from edge_rt.errors import EdgeRtError, InvalidRequestError
from edge_rt.types import GenerateRequest, Message, PinAction, PinnedPrefix

Done = Callable[[list[PinnedPrefix] | EdgeRtError], None]


class Pinning(Protocol):
    """What is needed of a TokenEngine."""

    warm: WarmStart
    is_isolated: bool

    def fitting_ids(self, request: GenerateRequest) -> list[int]: ...

    def call(self, act: Callable[[], None]) -> None: ...


def system_ids(engine: Pinning, text: str) -> list[int]:
    """Give the tokens that a chat begins with, whatever its first question. Raises as PromptReader.read does."""

    def ids(question: str) -> list[int]:
        messages = (Message(role="system", content=text), Message(role="user", content=question))
        return engine.fitting_ids(GenerateRequest(id="pin", model="", messages=messages))

    a, b = ids("a"), ids("What?")
    n_shared = common_prefix(a, b)
    if n_shared == 0:
        raise InvalidRequestError(param="system", problem="this model's chats do not begin with it")
    return a[:n_shared]


def pin(
    engine: Pinning,
    done: Done,
    *,
    action: PinAction,
    tenant: str,
    name: str = "",
    text: str = "",
) -> None:
    """Pin text by a name, or unpin a name, then tell done what is pinned; it hears on the engine's thread.

    tenant  who asks; where users are isolated, it sees its own pins and those of the configuration. Raises RequestError
            and ModelFormatError at once, for a text that makes no prompt.
    """
    if action == "unpin" and ":" in name:
        raise InvalidRequestError(param="name", problem=f"{name} is pinned by the configuration; remove it there")
    owner = owner_of(GenerateRequest(id="pin", model="", tenant=tenant), is_isolated=engine.is_isolated)
    ids = system_ids(engine, text) if action == "pin" else []

    def act() -> None:
        if action == "pin" and (problem := engine.warm.pin(name, owner, ids, tenant=tenant)):
            done(InvalidRequestError(param="system", problem=problem))
        elif action == "unpin" and not engine.warm.unpin(name, owner):
            done(InvalidRequestError(param="name", problem=f"nothing is pinned as {name!r}"))
        else:
            done(engine.warm.pins(frozenset({owner, public_part(owner)})))

    engine.call(act)
