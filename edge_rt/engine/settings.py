"""How an engine shares the machine among its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the loop shares the machine.

    max_stall_s       bounds the prompt part of a step while streams run, max_step_s the step without them
    max_prefix_bytes  finished sequences kept outside the KV for prompts that begin the same; 0 keeps none; or what says
                      how many bytes may be kept, given how many are
    isolate_prefixes  no prompt begins with what another tenant's has computed
    max_draft         tokens of one sequence guessed and checked in one step; 0 guesses none
    min_draft         fewer tokens than this, guessed by a drafting model, are not checked
    min_draft_chance  below this probability, by its own account, a drafting model's guess is not made
    """

    max_stall_s: float = 0.15
    max_step_s: float = 1.5
    stream_interval_s: float = 0.05
    max_prefix_bytes: int | Callable[[int], int] = 128 * 2**20
    isolate_prefixes: bool = False
    max_draft: int = 15
    min_draft: int = 0
    min_draft_chance: float = 0.0
