"""How much may go to the cloud: a share of requests and a cost per day, per tenant. Pure; the time is an argument.

The threshold on the expected gain is a quantile of the gains that came before, so that the wanted share is met whatever
the traffic is like: a threshold found on other traffic gives another share here.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

DAY_S: Final = 86_400
_WINDOW: Final = 512  # gains remembered of each tenant
_MAX_TENANTS: Final = 256
_MIN_DAY_S: Final = 6 * 3600.0  # that a clock which jumps makes of a day at least
_SHARE_MEMORY: Final = 200  # requests over which the real share is measured
_CATCH_UP: Final = 0.01  # of the difference between wanted and real is added to the quantile with each request
_PACE_RESERVE: Final = 0.25  # of a day's money that may be spent ahead of time

# What the shipped scorer gives to requests of five kinds, 150 of each (llmrouter_mix, routellm_mmlu, zeroeval_gsm,
# clinc150, banking77): 32 quantiles, printed by tools/train_router.py.
# A tenant's first requests are held against these until there are its own.
# fmt: off
SHIPPED_PRIOR: Final = (
    -0.304, -0.065, -0.026, 0.001, 0.013, 0.024, 0.032, 0.038, 0.046, 0.052, 0.058, 0.065, 0.07, 0.077, 0.084, 0.09,
    0.096, 0.103, 0.108, 0.116, 0.124, 0.131, 0.142, 0.15, 0.158, 0.169, 0.184, 0.207, 0.248, 0.328, 0.449, 0.783,
)
# fmt: on
# Gains of another scorer, or of none, are anywhere.
FLAT_PRIOR: Final = tuple(i / 31 - 0.25 for i in range(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What the budget allows one request.

    threshold    the gain above which it may go to the cloud
    cost_left    of the day; None where there is no limit
    """

    threshold: float
    cost_left: float | None

    @property
    def is_spent(self) -> bool:
        return self.cost_left is not None and self.cost_left <= 0


class Budget:
    """The cloud share of each tenant, and the day's cost and energy of all together.

    now_s is monotonic, wall_s the time of day in seconds since the epoch, local or UTC as the bill is.
    """

    def __init__(self, *, share: float, max_cost_per_day: float = 0.0, prior: Sequence[float] = FLAT_PRIOR) -> None:
        if not 0 <= share <= 1 or max_cost_per_day < 0 or not prior:
            raise ValueError("share is 0..1, the cost at least 0, and a prior has gains")
        self._share, self._max_cost, self._prior = share, max_cost_per_day, tuple(prior)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._spent = 0.0
        self._spent_j = 0.0
        self._day: int | None = None
        self._left_day: int | None = None  # which the clock was set back from
        self._day_began_s = -math.inf  # monotonic

    def configure(self, *, share: float, max_cost_per_day: float) -> None:
        """Allow another share and another cost a day; what has been spent stays spent."""
        if not 0 <= share <= 1 or max_cost_per_day < 0:
            raise ValueError("share is 0..1, the cost at least 0")
        self._share, self._max_cost = share, max_cost_per_day

    def begin_anew(self, prior: Sequence[float]) -> None:
        """Forget the gains of requests, which are judged otherwise from now on; what has been spent stays spent."""
        self._prior = tuple(prior)
        self._tenants.clear()

    def allowance(self, tenant: str, *, now_s: float, wall_s: float) -> Allowance:
        """Say what a request of this tenant may cost and must promise."""
        self._turn_day(now_s, wall_s)
        left = None
        share = self._share
        if self._max_cost > 0:
            left = self._max_cost - self._spent
            share *= self._pace(wall_s)
        return Allowance(threshold=self._of(tenant).threshold(share), cost_left=left)

    def observe(self, tenant: str, gain: float | None, *, went: bool) -> None:
        """Learn from a decision; gain None: it was not judged, but counts for the share."""
        self._of(tenant).observe(gain, went=went)

    def spend(self, cost: float, *, now_s: float, wall_s: float) -> None:
        """Count what an answer has cost."""
        self._turn_day(now_s, wall_s)
        if math.isfinite(cost) and cost > 0:
            self._spent += cost

    def spend_energy(self, energy_j: float, *, now_s: float, wall_s: float) -> None:
        """Count what an answer of this device took."""
        self._turn_day(now_s, wall_s)
        if math.isfinite(energy_j) and energy_j > 0:
            self._spent_j += energy_j

    def energy_spent_j(self, *, now_s: float, wall_s: float) -> float:
        """Give what this device's answers took today."""
        self._turn_day(now_s, wall_s)
        return self._spent_j

    @property
    def spent(self) -> float:
        return self._spent

    def share_of(self, tenant: str) -> float:
        """Give the share of this tenant's last requests that went to the cloud."""
        return self._of(tenant).real_share

    def state(self) -> dict[str, Any]:
        """Give what must survive a restart, as JSON can hold it."""
        day = self._day if self._left_day is None else self._left_day
        return {"day": day, "spent": self._spent, "spent_j": self._spent_j}

    def restore(self, state: dict[str, Any], *, now_s: float) -> bool:
        """Take what state gave, in another process. What is not such a thing changes nothing and gives False."""
        day, spent, spent_j = state.get("day"), state.get("spent"), state.get("spent_j", 0.0)
        amounts = [float(value) for value in (spent, spent_j) if _is_amount(value)]
        if isinstance(day, int) and len(amounts) == 2:
            # As if the day had begun long ago, so that the next one may follow at once.
            self._day, (self._spent, self._spent_j) = day, amounts
            self._day_began_s = now_s - DAY_S
            return True
        return False

    def _pace(self, wall_s: float) -> float:
        """Lower the share, down to nothing, as money goes faster than the day."""
        due = (wall_s % DAY_S) / DAY_S + _PACE_RESERVE
        spent = self._spent / self._max_cost
        if spent >= 1:
            return 0.0
        return min(1.0, max(0.0, 1.0 - (spent - due) / _PACE_RESERVE)) if spent > due else 1.0

    def _turn_day(self, now_s: float, wall_s: float) -> None:
        """Begin a new day's budget. A clock that is set forward and back again earns nothing by it."""
        day = int(wall_s // DAY_S)
        if self._day is None:
            self._day, self._day_began_s = day, now_s
        elif day > self._day and day == self._left_day:
            self._day, self._left_day = day, None  # a board without a clock of its own knows the time again
        elif day > self._day and now_s - self._day_began_s >= _MIN_DAY_S:
            self._day, self._day_began_s, self._spent, self._spent_j = day, now_s, 0.0, 0.0
            self._left_day = None
        elif day < self._day:
            # Set back: what was spent stays spent until this clock's midnight.
            self._day, self._left_day = day, self._left_day or self._day

    def _of(self, tenant: str) -> _Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._prior, self._share)
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return found


def _is_amount(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


class _Tenant:
    """Last gains in order, and how many went."""

    __slots__ = ("_catch_up", "_order", "_sorted", "_wanted", "_weight", "real_share")

    def __init__(self, prior: Sequence[float], share: float) -> None:
        self._order = deque(prior, maxlen=_WINDOW)
        self._sorted = sorted(prior)
        self._wanted, self._catch_up = share, 0.0
        self._weight = 0
        self.real_share = 0.0

    def threshold(self, share: float) -> float:
        """Give the quantile that meets the share, corrected by what was missed: by what rules sent as well."""
        self._wanted = share
        aim = min(max(share + self._catch_up, 0.0), 1.0)
        n_above = round(aim * len(self._sorted))
        if share <= 0 or n_above == 0:
            return math.inf
        if n_above >= len(self._sorted):
            return -math.inf
        return self._sorted[-n_above - 1]

    def observe(self, gain: float | None, *, went: bool) -> None:
        self._weight = min(self._weight + 1, _SHARE_MEMORY)
        self.real_share += (went - self.real_share) / self._weight
        catch_up = self._catch_up + _CATCH_UP * (self._wanted - went)
        self._catch_up = min(max(catch_up, -self._wanted), 1.0 - self._wanted)
        if gain is None or not math.isfinite(gain):
            return
        if len(self._order) == self._order.maxlen:
            del self._sorted[bisect_left(self._sorted, self._order[0])]
        self._order.append(gain)
        insort(self._sorted, gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long either side would take; None is not known.

    expected_tokens  of the answer
    local_first_s    until its first token: queue, load and prompt
    cloud_first_*    quantiles of its first byte
    """

    expected_tokens: float
    local_first_s: float | None = None
    local_tokens_per_s: float | None = None
    cloud_first_p50_s: float | None = None
    cloud_first_p95_s: float | None = None
    cloud_tokens_per_s: float | None = None

    @property
    def local_s(self) -> float | None:
        return _total_s(self.local_first_s, self.expected_tokens, self.local_tokens_per_s)

    @property
    def cloud_p50_s(self) -> float | None:
        return _total_s(self.cloud_first_p50_s, self.expected_tokens, self.cloud_tokens_per_s)

    @property
    def cloud_p95_s(self) -> float | None:
        return _total_s(self.cloud_first_p95_s, self.expected_tokens, self.cloud_tokens_per_s)


def _total_s(first_s: float | None, n_tokens: float, tokens_per_s: float | None) -> float | None:
    """A rate that is not known counts as no time: the first token alone is compared then."""
    if first_s is None:
        return None
    return first_s + (n_tokens / tokens_per_s if tokens_per_s else 0.0)


class AnswerLength:
    """Tokens that answers have, learnt from those given: what to expect of the next one."""

    def __init__(self, guess: float = 128.0) -> None:
        self._mean, self._weight = guess, 1.0

    def observe(self, n_tokens: int) -> None:
        self._weight = min(self._weight + 1, _SHARE_MEMORY)
        self._mean += (n_tokens - self._mean) / self._weight

    def expected(self, max_tokens: int | None) -> float:
        return self._mean if max_tokens is None else min(self._mean, max_tokens)
