"""What the services of language and tensor models have in common: the reader thread, and figures sent in time."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from edge_rt.errors import EdgeRtError
from edge_rt.types import EngineStats
from edge_rt.worker import channel
from edge_rt.worker.own_end import WorkerChannel

_log = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0


class Engine(Protocol):
    """What every service needs of its engine."""

    def stats(self) -> EngineStats: ...

    def run(self) -> None: ...

    def stop(self, drain_s: float) -> None: ...


class Service(ABC):
    """Turns messages into engine calls. run returns when the front process wants it or is gone."""

    def __init__(
        self,
        out: WorkerChannel,
        engine: Engine,
        rss_bytes: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = out
        self._loop = engine
        self._rss_bytes = rss_bytes
        self._clock = clock
        self._is_orderly = False

    @abstractmethod
    def _take(self, message: channel.ToWorker, *, is_last: bool) -> None:
        """Take a message, other than Shutdown, on the reader's thread, which it must not hold up.

        is_last  it is the last of those that were read
        """

    @abstractmethod
    def _work(self) -> None:
        """Do what would hold up the reader; on each of the clerks' threads, for ever."""

    def _stop(self, drain_s: float) -> None:
        """Stop the engine, on the reader's thread."""
        self._loop.stop(drain_s)

    def _has_work(self) -> bool:
        """Say whether requests are here that the engine does not know yet."""
        return False

    def _rest(self) -> None:
        """Let go of what the last requests have left; called when there are none, on the reader's thread."""
        return

    def run(self, *, n_clerks: int = 1) -> bool:
        """Serve until told to stop; True if that was by Shutdown, False if the front process vanished."""
        for i in range(n_clerks):
            threading.Thread(target=self._work, name=f"clerk-{i}", daemon=True).start()
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._loop.run()
        return self._is_orderly

    def _read(self) -> None:
        try:
            self._take_messages()
        except Exception:  # noqa: BLE001 - a worker that hears nothing would not even hear that it shall end
            _log.exception("the channel to the front process cannot be read")
        finally:
            self._loop.stop(0.0)

    def _take_messages(self) -> None:
        """Take messages until the front process is gone, and send it the engine's figures meanwhile."""
        is_busy, due_at_s = True, self._clock()  # the first figures go out at once: they tell what the load cost
        while True:
            # Idle, it sleeps until a message comes: an idle worker costs no CPU time.
            messages = self._channel.receive(max(0.0, due_at_s - self._clock()) if is_busy else None)
            if messages is None:
                return
            for i, message in enumerate(messages, 1):
                if isinstance(message, channel.Shutdown):
                    self._is_orderly = True
                    self._stop(message.drain_s)
                else:
                    self._take(message, is_last=i == len(messages))
            if not is_busy:
                is_busy, due_at_s = True, self._clock() + STATS_INTERVAL_S
            elif self._clock() >= due_at_s:
                stats = self._loop.stats()
                is_busy = bool(stats.running or stats.waiting or self._has_work())
                if not is_busy:
                    self._rest()
                self._send_stats()
                due_at_s = self._clock() + STATS_INTERVAL_S

    def _send_stats(self) -> None:
        self._channel.send(channel.Stats(replace(self._loop.stats(), rss_bytes=self._rss_bytes())))


def refuse(out: WorkerChannel, error: EdgeRtError) -> int:
    """Tell the front process why the model cannot be loaded; give the exit status."""
    out.send(channel.Failed("", *error.to_wire()))
    out.flush()
    return 1
