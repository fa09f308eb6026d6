"""What a worker is told to load."""

from __future__ import annotations

from edge_rt import config
from edge_rt.scheduler.forms import load_message, place
from edge_rt.worker.channel import Load


def message(**flags: object) -> Load:
    settings = config.load(environ={}, flags={f"engine.{name}": value for name, value in flags.items()}).config
    own = config.ModelSettings(backend="null")
    placement = place("null", None, own, settings, features=frozenset(), find=lambda *_: None)
    return load_message(placement, settings, force=False)


def test_a_step_has_a_row_for_every_stream() -> None:
    few = message(n_batch=32, n_parallel=100)
    assert (few.n_batch, few.n_seq_max) == (100, 100)
    assert message(n_batch=64, n_parallel=4).n_batch == 64
