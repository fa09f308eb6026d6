"""Whose adapters a step computes with: back ends add one set to all rows, and requests with others wait their turn."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from edge_rt.backends.base import Adaptable, TokenSession
from edge_rt.engine.sequence import Sequence
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import Adapter, Capabilities, GenerateRequest

Adapters = tuple[Adapter, ...]


def check(request: GenerateRequest, caps: Capabilities, backend: str) -> None:
    """Raise UnsupportedFeatureError where no adapter is loaded, InvalidRequestError for one that is not."""
    if not request.adapters:
        return
    if not caps.adapters:
        remedy = f"models.{request.model}.adapters names some, for the back end llama_cpu; this one is {backend}"
        raise UnsupportedFeatureError(feature="lora", remedy=remedy)
    for adapter in request.adapters:
        if adapter.name not in caps.adapters:
            problem = f"{adapter.name[:40]!r} is not loaded; there are {', '.join(caps.adapters)}"
            raise InvalidRequestError(param="lora", problem=problem)


class AdapterTurns:
    """Gives each set of adapters that is asked for its step in turn, and tells the session of it."""

    def __init__(self, session: TokenSession) -> None:
        self._session = session
        self._set: Adapters = ()
        self._served: dict[Adapters, int] = {}
        self._n_steps = 0

    def choose(self, running: ListOf[Sequence]) -> list[int]:
        """Give the places of those that the next step computes: of the set that has waited for the most steps."""
        sets = dict.fromkeys(sequence.request.adapters for sequence in running)
        if len(self._served) > len(sets):  # clients choose scales freely, so there is no end of sets
            self._served = {each: n for each, n in self._served.items() if each in sets}
        chosen = min(sets, key=lambda each: self._served.get(each, -1))  # of equals the first that was admitted
        self._n_steps += 1
        self._served[chosen] = self._n_steps
        return [i for i, sequence in enumerate(running) if sequence.request.adapters == chosen]

    def apply(self, sequence: Sequence) -> None:
        """Let the session compute with a sequence's adapters. Raises BackendStepError."""
        adapters = sequence.request.adapters
        if adapters != self._set and isinstance(self._session, Adaptable):
            self._session.set_adapters(adapters)
            self._set = adapters
