"""`edge_rt power`: what the machine takes, how fast it runs and how hot it is."""

from __future__ import annotations

from typing import Final

import click

from edge_rt.cli import LazyGroup

_COMMANDS: Final = {
    "status": "Show every meter, clock and temperature now.",
    "watch": "Plot the power as it changes.",
    "plan": "Show what powerd would set, and why.",
    "cap": "Cap the power until powerd ends.",
    "calibrate": "Measure what this board takes at each clock.",
}


@click.group(
    "power", cls=LazyGroup, overview=_COMMANDS, prefix="edge_rt.cli.power_", short_help="Show power, clocks and heat."
)
def command() -> None:
    """See what the machine takes, how fast it runs and how hot it is, and what tells so.

    Every number says where it was measured (board, chip, one rail) and whether it was measured, derived from what was,
    or modelled. What cannot be known is shown with the reason, never as 0. docs/power.md tells more.
    """
