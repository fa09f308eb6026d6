"""The requests that wait for the engine: in whose turn, what they need, and whom they may wait for."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf

from edge_rt.engine.prefix import shared_ahead
from edge_rt.engine.row_costs import RowCosts
from edge_rt.engine.sequence import Sequence
from edge_rt.engine.slots import Slots
from edge_rt.errors import DeadlineUnreachableError
from edge_rt.turns import Turns, in_turn, rank
from edge_rt.types import Capabilities, GenerateRequest, Priority

_GROWTH_TOKENS = 16


class Line:
    """Sequences without a slot, each with its request's priority and tenant. One who was put out of the KV is back in
    it, in front of those that came after him."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def add(self, sequence: Sequence, running: ListOf[Sequence]) -> None:
        request = sequence.request
        here = [(s.request.priority, s.request.tenant) for s in (*self._waiting, *running)]
        self.turns.join(request.priority, request.tenant, here)
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda s: s.submitted_s)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def clear(self) -> None:
        self._waiting.clear()

    def in_turn(self) -> list[Sequence]:
        """Give those that wait, in the order in which they may begin."""
        return in_turn(self.turns, ((s.request.priority, s.request.tenant, s) for s in self._waiting))

    def order(self, running: ListOf[Sequence]) -> list[int]:
        """Give the places in running of those that are computed, in turn."""
        return in_turn(self.turns, ((s.request.priority, s.request.tenant, i) for i, s in enumerate(running)))

    def charge(self, sequence: Sequence, n_rows: int) -> None:
        self.turns.charge(sequence.request.priority, sequence.request.tenant, n_rows)


def owner_of(request: GenerateRequest, *, is_isolated: bool) -> str:
    """Name whose prefixes a request may begin with: rows computed with other adapters are other rows.

    What nobody in particular asks for, as for pinned prefixes of the configuration, is everybody's.
    """
    adapters = "".join(f"\0{adapter.name}\0{adapter.scale!r}" for adapter in request.adapters)
    return (f"\1{request.tenant}" if is_isolated and request.tenant else "") + adapters


def waits_for_another(sequence: Sequence, running: ListOf[Sequence], slots: Slots, owner: str) -> bool:
    """Say whether a running sequence is about to compute what this one begins with, which then need not be twice.

    One that is less urgent is not waited for.
    """
    urgency = rank(sequence.request.priority)
    others = [
        (s.token_ids, s.n_computed)
        for s in running
        if s.slot is not None and s.slot.owner == owner and rank(s.request.priority) <= urgency
    ]
    if not any(n_computed < len(ids) - 1 for ids, n_computed in others):
        return False
    return shared_ahead(sequence.known_ids, others, slots.n_known(sequence.known_ids, owner)) > 0


def has_room(sequence: Sequence, running: ListOf[Sequence], slots: Slots, caps: Capabilities) -> bool:
    """Say whether there are its slots and cells to grow for everybody: else who comes would be put back again."""
    n_reserved = sum(s.n_cells(caps, _GROWTH_TOKENS) for s in (*running, sequence))
    return slots.n_free >= sequence.n_places and (not running or n_reserved <= caps.n_cells(caps.n_ctx))


def least_urgent(running: ListOf[Sequence]) -> Sequence:
    """Pick who makes room: of the lowest priority there is, the youngest."""
    return max(running, key=lambda s: (rank(s.request.priority), running.index(s)))


def displaceable(turns: Turns, priority: Priority, running: ListOf[Sequence]) -> Sequence | None:
    """Pick whose place a request may take: the least urgent one's, if it has had more than its share."""
    if not running:
        return None
    victim = least_urgent(running)
    return victim if turns.may_displace(priority, victim.request.priority) else None


def needed_s(sequence: Sequence, ahead: ListOf[Sequence], costs: RowCosts, slots: Slots, owner: str) -> float:
    """Expect when the first token of a new request comes at the earliest, by the measured rate; 0 if none is known."""
    n_known = slots.n_known(sequence.known_ids, owner)
    own_s = costs.seconds(len(sequence.token_ids) - n_known, n_known)
    return own_s + sum(costs.seconds(max(0, len(s.token_ids) - 1 - s.n_computed), s.n_computed) for s in ahead)


def check_deadline(
    sequence: Sequence, running: ListOf[Sequence], line: Line, costs: RowCosts, slots: Slots, owner: str, now_s: float
) -> None:
    """Raise DeadlineUnreachableError for a request whose first token cannot come in time.

    Only what surely comes before it counts: prompts that are more urgent, and its own tenant's.
    """
    deadline_s = sequence.request.deadline_s
    if deadline_s is None or costs.row_s <= 0.0:
        return
    request = sequence.request

    def is_ahead(other: GenerateRequest) -> bool:
        behind = rank(other.priority) - rank(request.priority)
        return behind < 0 or (behind == 0 and other.tenant == request.tenant)

    ahead = [s for s in (*running, *line) if s is not sequence and is_ahead(s.request)]
    need_s = now_s - sequence.submitted_s + needed_s(sequence, ahead, costs, slots, owner)
    if need_s > deadline_s:
        raise DeadlineUnreachableError(needed_s=round(need_s, 3), deadline_s=deadline_s)
