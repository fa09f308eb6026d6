"""Put an engine on a loaded model, set up for this machine."""

from __future__ import annotations

from collections.abc import Callable

from edge_rt.backends.base import TokenSession
from edge_rt.devices import cpu
from edge_rt.engine.draft_model import DraftModel
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.engine.threads import ThreadChoice, candidates
from edge_rt.engine.tokens import EngineSettings, TokenEngine


def start_engine(
    session: TokenSession,
    settings: EngineSettings,
    *,
    n_threads: int = 0,
    idle_cores: Callable[[], float | None] = lambda: None,
    disk: PrefixDisk | None = None,
    draft_model: DraftModel | None = None,
) -> TokenEngine:
    """Make an engine; the caller gives it a thread, which shall be the first to call warm_up and then run.

    One thread for both matters: libgomp keeps a pool of threads for each thread that computes, and stops spinning at
    barriers when all pools together have more threads than there are cores.

    n_threads   0 lets the engine choose among the counts up to the cores worth a compute thread
    idle_cores  how many cores did nothing lately. Called first before the load, it knows by now how many cores
                the neighbours leave: the load itself keeps one busy.
    draft_model the engine closes it when it is stopped
    """
    counts = (n_threads,) if n_threads else candidates(len(cpu.usable_cores()))
    idle = idle_cores()
    start = None if idle is None else 1 + round(idle)
    choice = ThreadChoice(counts, start=start)
    return TokenEngine(session, settings, choice, idle_cores=idle_cores, disk=disk, draft_model=draft_model)
