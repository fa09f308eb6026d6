"""Default < file < environment EDGE_RT__A__B < flag: from one TOML file to frozen structs. Unknown keys fail.

No probing and no directories made here: what depends on the machine is resolved in runtime and daemon.

In EDGE_RT__MODELS__SMOLLM2_135M_INSTRUCT__N_CTX the model's id is written as a shell allows: case is ignored and _
stands for any of - . _. Lists are separated by colons, as in PATH.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from edge_rt.config.pins import check_pins, pin_error, pin_places
from edge_rt.config.tables import NAMED, Config, plain_id
from edge_rt.errors import ConfigError
from edge_rt.regular import read_regular

_PREFIX = "EDGE_RT__"
_FILE_VARIABLE = "EDGE_RT_CONFIG"
SYSTEM_FILE = Path("/etc/edge_rt/config.toml")
_MAX_BYTES = 2**20

Key = tuple[str, ...]  # ("models", "qwen2.5-0.5b", "n_ctx"); shown as TOML writes it, see dotted


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key with its value and where the value comes from (default, a file's path, env NAME, or flag)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked configuration and the origin of each key that is not a default; pin_places: of each pin, its line."""

    config: Config
    origins: Mapping[str, str]
    pin_places: tuple[str, ...] = ()

    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(key=dotted(key), value=value, origin=self.origins.get(dotted(key), "default"))
            for key, value in _flatten(msgspec.to_builtins(self.config))
        )


def load(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Loaded:
    """Read and check the configuration. Raises ConfigError naming key, value and origin.

    file   None takes $EDGE_RT_CONFIG, else system_file where it exists; a named file must exist
    flags  dotted key -> value; None values are skipped, so that absent options fall through
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    places: tuple[str, ...] = ()
    if (path := _find(file, environ, system_file)) is not None:
        values, text = _read(path)
        origins = {key: str(path) for key, _ in _flatten(values)}
        if isinstance(pins := values.get("pin"), list):
            places = pin_places(text, path, len(pins))
        _convert(values, origins, places, strict=True)
    for name in sorted(environ):
        if name.startswith(_PREFIX):
            origin = f"env {name}"
            key = _from_env(name, values.get("models", {}), origin)
            _put(values, key, _split_list(key, environ[name]), origin)
            origins[key] = origin
    for flag, value in (flags or {}).items():
        if value is not None:
            key = parse_key(flag)
            _put(values, key, value, "flag")
            origins[key] = "flag"
    config = _convert(values, origins, places, strict=False)
    check_pins(config.pin, places)
    return Loaded(config=config, origins={dotted(key): origin for key, origin in origins.items()}, pin_places=places)


@contextmanager
def named(file: Path | None) -> Iterator[None]:
    """Let back ends, here and in child processes, load the file that this process was told to; None changes nothing."""
    before = os.environ.get(_FILE_VARIABLE)
    if file is not None:
        os.environ[_FILE_VARIABLE] = str(file.absolute())
    try:
        yield
    finally:
        if file is not None:
            if before is None:
                del os.environ[_FILE_VARIABLE]
            else:
                os.environ[_FILE_VARIABLE] = before


def dotted(key: Key) -> str:
    """Write a key as TOML does: a part with a dot in it is quoted."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in key)


def parse_key(text: str) -> Key:
    """Split what dotted wrote."""
    return tuple(quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^."]+)', text)) or (text,)


def _find(file: Path | None, environ: Mapping[str, str], system_file: Path) -> Path | None:
    if file is not None:
        return file
    if name := environ.get(_FILE_VARIABLE):
        return Path(name)
    return system_file if os.path.lexists(system_file) else None


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        return tomllib.loads(text), text
    except OSError as exc:
        raise ConfigError(
            key="configuration file", problem=f"cannot be read: {exc.strerror}", origin=str(path)
        ) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(key="TOML", problem=str(exc), origin=str(path)) from exc


def _from_env(name: str, models: Mapping[str, Any], origin: str) -> Key:
    """Turn a variable's name into a key; a model that the file also names keeps the file's spelling."""
    table, *rest = name[len(_PREFIX) :].lower().split("__")
    if table == "models" and rest:
        same = [model_id for model_id in models if plain_id(model_id) == plain_id(rest[0])]
        if len(same) > 1:
            raise ConfigError(key=name, problem=f"stands for each of {', '.join(same)}", origin=origin)
        rest[:1] = same or rest[:1]
    return (table, *rest)


def _split_list(key: Key, value: str) -> str | list[str]:
    default: Any = Config()
    for part in key:
        default = getattr(default, part, None)
    return [part for part in value.split(os.pathsep) if part] if isinstance(default, tuple) else value


def _convert(values: dict[str, Any], origins: Mapping[Key, str], places: tuple[str, ...], *, strict: bool) -> Config:
    try:
        config = msgspec.convert(values, Config, strict=strict)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `")
        if (error := pin_error(place, problem, values, places)) is not None:
            raise error from exc
        is_name = place.startswith("key` in `")  # what is wrong is a name in a table of plain values
        key = _locate(values, place.removeprefix("key` in `").lstrip("$").rstrip("`"), strict=strict)
        if "unknown field" in problem:
            key = (*key, problem.split("`")[1])
            problem = "no such key" + _suggest(key)
        else:
            if "enum" in problem:
                problem = f"Expected {'names that are ' * is_name}one of {', '.join(_choices(key, of_names=is_name))}"
            problem = re.sub(r", got `\w+`$", "", problem).replace("`object`", "a table")
            problem = f"{problem}, got {_get(values, key)!r}"
        raise ConfigError(key=dotted(key), problem=problem, origin=_origin(origins, key)) from exc
    for key, value in _flatten(msgspec.to_builtins(config)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(key=dotted(key), problem=f"must be finite, got {value}", origin=_origin(origins, key))
    return config


def _locate(values: Mapping[str, Any], place: str, *, strict: bool) -> Key:
    """Find the key msgspec complains of; it writes [...] for a name in [models.*] or [cloud.*]."""
    key: list[str] = []
    for name, index in re.findall(r"\.(\w+)|\[([^]]+)\]", place):
        if name:
            key.append(name)
        elif index == "...":
            kind: Any = NAMED.get(key[0])
            if kind is None or len(key) > 1:  # any value of a table inside
                table = kind or type(getattr(Config(), key[0]))
                (_, kind) = get_args(get_type_hints(table)[key[-1]])
            key.append(next(name for name, table in _get(values, tuple(key)).items() if not _is_a(kind, table, strict)))
    return tuple(key)


def _is_a(kind: Any, table: Any, strict: bool) -> bool:
    try:
        msgspec.convert(table, kind, strict=strict)
    except msgspec.ValidationError:
        return False
    return True


def _suggest(key: Key) -> str:
    known = [dotted(known) for known, _ in _flatten(msgspec.to_builtins(Config()))]
    if key[0] in NAMED and len(key) > 2:
        known = [dotted((*key[:2], name)) for name in NAMED[key[0]].__struct_fields__]
    near = difflib.get_close_matches(dotted(key), known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "; `edge_rt config show` lists them all"


def _choices(key: Key, *, of_names: bool) -> tuple[str, ...]:
    table: type[Any] = NAMED[key[0]] if key[0] in NAMED else type(getattr(Config(), key[0]))
    kind: Any = get_type_hints(table)[key[-1] if key[0] in NAMED else key[1]]
    if get_origin(kind) is dict:  # a table of plain values, of which one is wrong
        kind = get_args(kind)[0 if of_names else 1]
    return tuple(
        choice
        for part in (get_args(kind) or (kind,))
        for choice in (get_args(part) or (part,))
        if isinstance(choice, str) and choice
    )


def _origin(origins: Mapping[Key, str], key: Key) -> str:
    """Tell where a key's value comes from; a table's value comes from its first key."""
    under = (origin for k, origin in origins.items() if k[: len(key)] == key)
    return origins.get(key) or next(under, "configuration")


def _flatten(table: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _put(values: dict[str, Any], key: Key, value: Any, origin: str) -> None:
    for n_parts in range(1, len(key)):
        child = values.setdefault(key[n_parts - 1], {})
        if not isinstance(child, dict):
            raise ConfigError(
                key=dotted(key), problem=f"{dotted(key[:n_parts])} is a value, not a table", origin=origin
            )
        values = child
    values[key[-1]] = value


def _get(values: Any, key: Key) -> Any:
    for name in key:
        values = values.get(name) if isinstance(values, dict) else None
    return values
