"""What every loaded model of the library is: an engine on a thread of its own, until it is closed."""

from __future__ import annotations

import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, Self

from edge_rt.config import Power
from edge_rt.errors import ShuttingDownError, UnsupportedFeatureError
from edge_rt.power.shared import MONITORS

_NUMBERS: Final = count(1)


class Running(ABC):
    """A loaded model. Close it, or use it in a with statement.

    Any thread may use and close it. A process made by fork cannot use its parent's: no thread survives a fork.
    What answers take is told by the meter of the settings power; raises ConfigError for one that is none.
    Subclasses say in _run what the thread does, and begin when they are whole.
    """

    def __init__(
        self, name: str, stop_engine: Callable[[float], None], close_session: Callable[[], None], power: Power
    ) -> None:
        self._power = power
        self._energy = MONITORS.take(power)
        self._engine_name = f"{name}#{next(_NUMBERS)}"  # a model may be loaded twice
        self._stop_engine = stop_engine
        self._close_session = close_session
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._n_users = 0  # calls that use the session on their own threads
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"edge_rt-{name}", daemon=True)

    def _begin(self) -> None:
        self._thread.start()
        # An engine that computes while the interpreter takes itself down would be cut off inside its back end.
        atexit.register(self.close)

    @abstractmethod
    def _run(self) -> None:
        """Run the engine until it is stopped."""

    def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine, giving what runs drain_s to finish, and free the model's memory."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._is_closing = True
        self._stop_engine(drain_s)
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: self._n_users == 0)
            if not self._is_closed:
                self._is_closed = True
                self._close_session()
                MONITORS.give_back(self._power)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the session open for a call that uses it on the caller's thread."""
        if self._pid != os.getpid():
            raise UnsupportedFeatureError(feature="using a model after a fork", remedy="load it in the child")
        with self._changed:
            if self._is_closing:
                raise ShuttingDownError
            self._n_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_users -= 1
                if self._is_closing:
                    self._changed.notify_all()
