"""What a cpufreq policy does with what is written to it: one list that the modelled board and a real driver must meet.

A limit that was taken comes into force a moment later, by a kernel thread: what is read at once may be the old one.

Standard library only: tests/kernel runs it inside a guest, on acpi-cpufreq with these very points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

POINTS_KHZ = (600_000, 1_000_000, 1_500_000, 2_000_000, 2_400_000)


class Step(NamedTuple):
    """Write text (None: only read) to a file of the policy; fails with an errno's name or not; then the file shows."""

    file: str
    text: str | None
    fails: str = ""
    shows: str | None = None


MAX, MIN = "scaling_max_freq", "scaling_min_freq"
GOVERNOR, SETSPEED, CURRENT = "scaling_governor", "scaling_setspeed", "scaling_cur_freq"

# Before each fact: no limit, and the governor that holds the highest clock.
RESET = (Step(MAX, "99999999"), Step(MIN, "0"), Step(GOVERNOR, "performance"))

FACTS: dict[str, tuple[Step, ...]] = {
    "a maximum below the range is clamped silently": (Step(MAX, "100", shows="600000"),),
    "a maximum above the range is clamped silently": (Step(MAX, "99999999", shows="2400000"),),
    "a maximum between two points becomes the lower one": (Step(MAX, "1234567", shows="1000000"),),
    "a minimum between two points becomes the upper one": (Step(MIN, "1234567", shows="1500000"),),
    "a newline at the end is welcome": (Step(MAX, "1500000\n", shows="1500000"),),
    "a minimum above the maximum is taken, and shows as the maximum until that rises": (
        Step(MAX, "1000000", shows="1000000"),
        Step(MIN, "2000000", shows="1000000"),
        Step(MAX, "2400000", shows="2400000"),
        Step(MIN, None, shows="2000000"),
    ),
    "a maximum below the minimum takes the minimum with it": (
        Step(MIN, "2000000", shows="2000000"),
        Step(MAX, "1000000", shows="1000000"),
        Step(MIN, None, shows="1000000"),
    ),
    "a word is no number": (Step(MAX, "abc", "EINVAL", "2400000"),),
    "nothing is no number": (Step(MAX, "\n", "EINVAL", "2400000"),),
    "a negative number is none": (Step(MAX, "-1", "EINVAL", "2400000"), Step(MIN, "-600000", "EINVAL", "600000")),
    "an unknown governor is refused": (Step(GOVERNOR, "fastest", "EINVAL", "performance"),),
    "setspeed needs userspace": (Step(SETSPEED, "1000000", "EINVAL", "<unsupported>"),),
    "setspeed rounds up to a point, within the limits": (
        Step(GOVERNOR, "userspace", shows="userspace"),
        Step(SETSPEED, "1234567", shows="1500000"),
        Step(CURRENT, None, shows="1500000"),
        Step(SETSPEED, "99999999"),
        Step(CURRENT, None, shows="2400000"),
        Step(MAX, "1000000", shows="1000000"),
        Step(CURRENT, None, shows="1000000"),
    ),
    "performance runs at the maximum, powersave at the minimum": (
        Step(MAX, "2000000", shows="2000000"),
        Step(CURRENT, None, shows="2000000"),
        Step(MIN, "1000000", shows="1000000"),
        Step(GOVERNOR, "powersave\n", shows="powersave"),
        Step(CURRENT, None, shows="1000000"),
    ),
    "what is read-only is refused at opening, to root too": (
        Step("cpuinfo_max_freq", "1", "EACCES", "2400000"),
        Step(CURRENT, "1", "EACCES"),
        Step("affected_cpus", "1", "EACCES"),
    ),
}


def broken(
    steps: tuple[Step, ...],
    read: Callable[[str], str],
    write: Callable[[str, str], str],
    wait: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Play a fact from the beginning and say what differs.

    read   gives a file's text, stripped
    write  gives the errno's name, or "" where it was taken
    wait   lets some time pass, where a limit may still come into force; False: that was long enough
    """
    for step in RESET:
        write(step.file, step.text or "")
    differs = []
    for step in steps:
        if step.text is not None and (failed := write(step.file, step.text)) != step.fails:
            differs.append(f"{step.file} < {step.text!r}: {failed or 'taken'}, not {step.fails or 'taken'}")
        while step.shows is not None and (shown := read(step.file)) != step.shows:
            if not wait():
                differs.append(f"{step.file} shows {shown!r} after {step.text!r}, not {step.shows!r}")
                break
    return differs
