"""One monitor for all models that a process has loaded through the library: they share the machine and its joules."""

from __future__ import annotations

import logging
import threading
from typing import Final

from edge_rt.config import Power
from edge_rt.power.meter import open_meter
from edge_rt.power.monitor import EnergyMonitor, Unmeasured

_log = logging.getLogger(__name__)


class SharedMonitors:
    """Opens a meter for the first model that wants it, and closes it with the last one. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], tuple[EnergyMonitor | Unmeasured, int]] = {}

    def take(self, settings: Power, *, origin: str = "default") -> EnergyMonitor | Unmeasured:
        """Give the monitor of a configuration; to be given back. Raises ConfigError for a meter that is none."""
        key = settings.meter, settings.model_file
        with self._lock:
            monitor, n_users = self._open.get(key, (None, 0))
            if monitor is None:
                chosen = open_meter(settings, origin=origin)
                monitor = chosen.monitor() or Unmeasured()
                if chosen.reason:
                    _log.info("answers do not tell what they took: %s", chosen.reason)
            self._open[key] = monitor, n_users + 1
            return monitor

    def give_back(self, settings: Power) -> None:
        key = settings.meter, settings.model_file
        with self._lock:
            monitor, n_users = self._open.pop(key)
            if n_users > 1:
                self._open[key] = monitor, n_users - 1
            elif isinstance(monitor, EnergyMonitor):
                monitor.close()


MONITORS: Final = SharedMonitors()
