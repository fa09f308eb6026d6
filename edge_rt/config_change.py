"""What a changed configuration means to a running daemon: what holds at once, what later, what only after a restart.

Pure. Every key has a rule; a test sees to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from edge_rt.config import Config, Key, ModelSettings, dotted

When = Literal["now", "next load", "restart", "powerd"]

# By a key's beginning; the longest one counts, * stands for a table's name.
_RULES: Final[Mapping[Key, When]] = {
    ("server",): "restart",
    ("server", "api_keys_file"): "now",
    ("server", "max_body_bytes"): "now",
    ("server", "max_file_bytes"): "now",
    ("server", "max_bodies_bytes"): "now",
    ("server", "max_connections"): "restart",  # the limit of open files follows it
    ("server", "drain_s"): "now",
    ("server", "access_log"): "now",
    ("limits",): "now",
    ("engine",): "next load",
    ("engine", "n_parallel"): "restart",  # admission and the loaded engine must have the same
    ("tensor",): "restart",
    ("fpga",): "restart",
    ("npu",): "next load",
    ("placement",): "now",
    ("placement", "profile_file"): "restart",
    ("scheduler",): "now",
    ("worker",): "next load",
    ("worker", "keep_alive_s"): "now",
    ("worker", "max_loaded"): "now",
    ("catalog",): "restart",
    ("catalog", "default_model"): "now",
    ("cache",): "restart",
    ("cache", "ttl_s"): "now",
    ("cache", "volatile_ttl_s"): "now",
    ("cache", "isolate"): "now",
    ("cache", "sampled"): "now",
    ("cache", "similar_frames"): "now",
    ("router",): "now",
    ("cloud",): "now",
    ("power",): "powerd",
    ("power", "meter"): "restart",
    ("power", "socket_path"): "restart",
    ("power", "ttft_slo_s"): "now",
    ("log",): "now",
    ("models",): "next load",
    ("pin",): "next load",
    ("models", "*", "n_parallel"): "restart",
    ("models", "*", "preload"): "restart",
    ("models", "*", "keep_alive_s"): "now",
}


_OF_GRPC: Final = frozenset({("server", "max_body_bytes")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that has another value than before, and when that counts."""

    key: str
    when: When


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """config: what holds from now on, in which keys that need a restart have their old values."""

    config: Config
    changes: tuple[Change, ...]

    def keys(self, when: When) -> tuple[str, ...]:
        return tuple(change.key for change in self.changes if change.when == when)

    def lines(self) -> tuple[str, ...]:
        """Write for people what changed, a line for each time at which it counts."""
        words: tuple[tuple[When, str], ...] = (
            ("now", "changed"),
            ("next load", "changed for models that are loaded from now on"),
            ("powerd", "the power helper's, which reads them on its own reload"),
            ("restart", "need a restart and stay as they were"),
        )
        found = ((text, self.keys(when)) for when, text in words)
        return tuple(f"{text}: {', '.join(keys)}" for text, keys in found if keys)


def when(key: Key) -> When | None:
    """Say when a change of a key counts; None for one without a rule."""
    for n_parts in range(len(key), 0, -1):
        part = key[:n_parts]
        for candidate in (part, (part[0], "*", *part[2:])) if n_parts > 2 else (part,):
            if (rule := _RULES.get(candidate)) is not None:
                return rule
    return None


def plan(old: Config, new: Config, *, fixed_models: Iterable[str] = ()) -> Plan:
    """Say what changes from old, which holds now, to new.

    fixed_models  whose tables count at a restart only
    """
    before, wanted = msgspec.to_builtins(old), msgspec.to_builtins(new)
    fixed = set(fixed_models)
    changes: list[Change] = []
    flat_before, flat_new = dict(_flatten(before)), dict(_flatten(wanted))
    for key in sorted({*flat_before, *flat_new}):
        default = _MODEL.get(key[-1], _ABSENT) if key[0] == "models" else _ABSENT  # a table that is not there
        then = flat_before.get(key, default)
        if then == flat_new.get(key, default):
            continue
        rule = "restart" if key[0] == "models" and key[1] in fixed else when(key)
        assert rule is not None, key
        changes.append(Change(key=dotted(key), when=rule))
        if rule == "restart":
            _put(wanted, key, then)
        elif key in _OF_GRPC and old.server.grpc_socket_path:
            # Its server is told once how long a message may be.
            changes.append(Change(key=f"{dotted(key)} of gRPC", when="restart"))
    wanted["models"] = {
        name: table for name, table in wanted["models"].items() if name in old.models or table != _MODEL
    }
    return Plan(config=msgspec.convert(wanted, Config), changes=tuple(changes))


_ABSENT: Final = object()
_MODEL: Final[Mapping[str, Any]] = msgspec.to_builtins(ModelSettings())


def _flatten(table: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and (value or not prefix):
            yield from _flatten(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _put(table: dict[str, Any], key: Key, value: Any) -> None:
    """Set a key, or remove it with the tables that become empty by it."""
    if len(key) > 1:
        child = table.setdefault(key[0], {})
        _put(child, key[1:], value)
        if not child:
            del table[key[0]]
    elif value is _ABSENT:
        table.pop(key[0], None)
    else:
        table[key[0]] = value
