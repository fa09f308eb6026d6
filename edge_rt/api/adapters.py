"""Which LoRA adapters a request wants: by its field lora, as llama-server has it, or by a model's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edge_rt.api.schemas import WireAdapter
from edge_rt.errors import InvalidRequestError
from edge_rt.types import Adapter, GenerateRequest


def read_adapters(
    model: str, lora: Sequence[WireAdapter] | None, names_of: Callable[[str], tuple[str, ...]]
) -> tuple[str, tuple[Adapter, ...]]:
    """Give the model that is meant, and its adapters.

    names_of  gives the adapters of a model, of any or none: context.Api.adapters

    "MODEL:ADAPTER" stands for the model with one of them. An id of lora is such a name, or its place among them; what
    has a scale of 0 is left out, as llama-server does. Raises InvalidRequestError.
    """
    base, _, name = model.rpartition(":")
    if base and name in names_of(base):
        if lora:
            raise InvalidRequestError(param="lora", problem=f"and the model {model} both name adapters; give one")
        return base, (Adapter(name=name),)
    names = names_of(model) if lora else ()
    found = []
    for i, entry in enumerate(lora or ()):
        if isinstance(entry.id, str):
            wanted = entry.id  # the engine knows which there are
        elif 0 <= entry.id < len(names):
            wanted = names[entry.id]
        else:
            problem = f"must be from 0 to {len(names) - 1}, got {entry.id}" if names else "names none: there are none"
            raise InvalidRequestError(param=f"lora[{i}].id", problem=problem)
        if entry.scale != 0.0:
            found.append(Adapter(name=wanted, scale=entry.scale))
    return model, tuple(found)


def named_adapter(asked: GenerateRequest, names_of: Callable[[str], tuple[str, ...]]) -> GenerateRequest:
    """Add the adapter that a request's model may name."""
    model, adapters = read_adapters(asked.model, None, names_of)
    return replace(asked, model=model, adapters=adapters) if adapters else asked
