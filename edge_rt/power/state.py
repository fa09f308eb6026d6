"""What the governor sees and what it decides: plain values. Standard library only, as all that powerd runs.

Times are of the monotonic clock, which all processes of a machine share. Frequencies are in Hz; a domain is what has
one clock: a cpufreq policy with its CPUs, or a devfreq device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edge_rt.devices.meters import Boundary, Quality

Work = Literal["idle", "prefill", "decode"]
DomainKind = Literal["cpu", "gpu", "npu", "memory"]

HINT_S: Final = 2.0  # a hint that is older says nothing of now

_SAME_DUE_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How the inference daemon may work for fewer joules; None leaves a matter to it.

    n_prefill_threads, n_decode_threads  at most so many compute
    max_batch  answers decoded together; those that run go on
    """

    n_prefill_threads: int | None = None
    n_decode_threads: int | None = None
    max_batch: int | None = None


NO_ADVICE: Final = Advice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What the inference daemon tells: at each arrival and change of phase, and every 0.5 s while it works.

    work             what the next steps are made of; prefill if both
    n_waiting        requests that have not begun, anywhere in the daemon
    n_running        requests that are being computed
    n_prompt_tokens  of the prompt whose first token is due next; estimated, and the same until that token has come
    ttft_left_s      until the first token that is due next; negative when it is late; None: none is due
    tpot_s           of the slowest running answer's last tokens; None without one
    n_threads        that compute
    max_threads, max_batch  the daemon's own limits, within which it takes advice; 0: it takes none
    sent_s           when
    """

    work: Work
    n_waiting: int = 0
    n_running: int = 0
    n_prompt_tokens: int = 0
    ttft_left_s: float | None = None
    tpot_s: float | None = None
    n_threads: int = 0
    max_threads: int = 0
    max_batch: int = 0
    sent_s: float = 0.0

    def tells_anew(self, before: Hint) -> bool:
        """Tell whether a prompt's tokens were estimated before, and its engine begins with it and has counted them.

        Two prompts whose first tokens are due at the same time are one.
        """
        if self.work != "prefill" or before.work != "prefill" or self.ttft_left_s is None or before.ttft_left_s is None:
            return False
        due_s, due_before_s = self.sent_s + self.ttft_left_s, before.sent_s + before.ttft_left_s
        return abs(due_s - due_before_s) < _SAME_DUE_S and self.n_prompt_tokens != before.n_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What can be given an upper clock, and its steps.

    name         as the kernel has it: "policy0", "fdab0000.npu"
    points_hz    ascending; a grid where the driver takes any value
    n_cpus       0 for what is no CPU
    capacity     of one CPU relative to the machine's best, 0..1
    """

    name: str
    kind: DomainKind
    points_hz: tuple[float, ...]
    n_cpus: int = 0
    capacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """A power reading; power_w None is unknown."""

    power_w: float | None
    boundary: Boundary
    quality: Quality
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that is known at now_s.

    hint           None: none has come, or the last one is older than 2 s
    power          by the meter whose boundary the cap has; None without a meter
    temperature_c  the hottest of the chip's; None is unknown
    throttled      the kernel or firmware slows the chip down already
    utilisation    of the busiest CPU domain since the last observation, 0..1
    is_on_battery  None where there is no battery
    max_hz         by domain: what is in force now, as read back
    advice         what the daemon works by now; the empty one: none was given, or none is taken
    """

    now_s: float
    hint: Hint | None = None
    power: Power | None = None
    temperature_c: float | None = None
    throttled: bool = False
    utilisation: float | None = None
    is_on_battery: bool | None = None
    battery: float | None = None
    max_hz: Mapping[str, float] = field(default_factory=dict)
    advice: Advice = NO_ADVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must hold, and what is wanted.

    max_w       0: no cap; of the boundary of the meter in use, else of the model
    battery_w   the cap on battery; 0: max_w
    max_c       the chip is kept below
    ttft_slo_s, tpot_slo_s  wanted of 95 of 100 answers
    """

    max_w: float = 0.0
    battery_w: float = 0.0
    max_c: float = 80.0
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the governor wants.

    max_hz  by domain, each one of its points
    advice  to the daemon; the empty one: its own choice
    reason  a word for counters and `edge_rt power status`: "idle", "prefill", "decode", "race", "cap", "heat", …
    """

    max_hz: Mapping[str, float]
    advice: Advice = NO_ADVICE
    reason: str = ""
