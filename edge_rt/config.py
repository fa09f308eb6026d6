"""One TOML file to frozen structs: default < file < environment EDGE_RT__A__B < flag. Unknown keys fail.

No probing and no directories made here: what depends on the machine is resolved in runtime and daemon.
An empty string or 0 means "choose for this machine" where the comment says so.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edge_rt.errors import ConfigError

_PREFIX = "EDGE_RT__"
SYSTEM_FILE = Path("/etc/edge_rt/config.toml")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Mode = Annotated[str, Meta(pattern="^0?[0-7]{3}$")]


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket_path: str = ""  # "": $RUNTIME_DIRECTORY, else /run/edge_rt (root), else $XDG_RUNTIME_DIR/edge_rt
    socket_mode: Mode = "0660"
    socket_group: str = ""  # "": the daemon's own group
    tcp_host: str = ""  # "": no TCP; otherwise api_keys_file is required
    tcp_port: Port = 8970
    api_keys_file: str = ""  # one key a line, '#' comments
    max_body_bytes: Positive = 4 * 2**20
    drain_s: Seconds = 4.0  # on SIGTERM, how long running answers may go on
    access_log: bool = True


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_messages: Positive = 512
    max_prompt_bytes: Positive = 2 * 2**20
    max_stop: Positive = 16
    max_stop_bytes: Positive = 256
    max_logit_bias: Positive = 1024
    max_top_logprobs: Count = 20
    max_json_depth: Positive = 16


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: str = ""  # "": the first that supports the model
    n_ctx: Count = 0  # 0: the manifest's
    n_parallel: Annotated[int, Meta(ge=1, le=256)] = 8  # sequences decoded together
    n_batch: Annotated[int, Meta(ge=32, le=8192)] = 512  # rows of one step
    n_threads: Count = 0  # 0: chosen and changed by measured step time
    max_stall_s: Annotated[float, Meta(gt=0.0)] = 0.15  # a prefill chunk may delay running streams this long
    stream_interval_s: Seconds = 0.02  # tokens that come faster share one event; the first never waits
    kv_type: Literal["f16", "q8_0"] = "f16"


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_waiting: Count = 64
    max_waiting_per_tenant: Count = 0  # 0: no limit of its own
    queue_timeout_s: Seconds = 120.0


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep_alive_s: float = 300.0  # unload after this long idle; negative: never
    load_timeout_s: Seconds = 180.0
    step_timeout_s: Seconds = 60.0  # a worker silent for longer in the middle of work is killed
    memory_margin_bytes: Count = 128 * 2**20
    max_loaded: Positive = 4


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store_dir: str = ""  # "": $STATE_DIRECTORY, else /var/lib/edge_rt (root), else the user's data directory
    manifest_dirs: tuple[str, ...] = ()  # searched before the manifests that come with edge_rt
    default_model: str = "smollm2-135m-instruct"
    hub_endpoint: str = "https://huggingface.co"
    hub_token_file: str = ""
    offline: bool = False


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    variant: str = ""  # "": the fastest form for this CPU
    backend: str = ""
    n_ctx: Count = 0
    n_parallel: Count = 0
    keep_alive_s: float | None = None
    preload: bool = False


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: Server = Server()
    limits: Limits = Limits()
    engine: Engine = Engine()
    scheduler: Scheduler = Scheduler()
    worker: Worker = Worker()
    catalog: Catalog = Catalog()
    log: Log = Log()
    models: dict[str, ModelSettings] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key with its value and where the value comes from (default, a file's path, env NAME, or flag)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked configuration and the origin of each key that is not a default."""

    config: Config
    origins: Mapping[str, str]

    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(key=key, value=value, origin=self.origins.get(key, "default"))
            for key, value in _flatten(msgspec.to_builtins(self.config))
        )


def load(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read and check the configuration. Raises ConfigError naming key, value and origin.

    file   None takes $EDGE_RT_CONFIG, else the system file where it exists; a named file must exist
    flags  dotted key -> value; None values are skipped, so that absent options fall through
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if (path := _find(file, environ)) is not None:
        table = _read(path)
        for key, value in _flatten(table):
            _put(values, key, value)
            origins[key] = str(path)
        _convert(values, origins, strict=True)
    for name in sorted(environ):
        if name.startswith(_PREFIX):
            key = name[len(_PREFIX) :].lower().replace("__", ".")
            _put(values, key, environ[name])
            origins[key] = f"env {name}"
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value)
            origins[key] = "flag"
    return Loaded(config=_convert(values, origins, strict=False), origins=origins)


def _find(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if name := environ.get("EDGE_RT_CONFIG"):
        return Path(name)
    return SYSTEM_FILE if SYSTEM_FILE.exists() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(key="--config", problem=f"cannot be read: {exc.strerror}", origin=str(path)) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(key="TOML", problem=str(exc), origin=str(path)) from exc


def _convert(values: dict[str, Any], origins: Mapping[str, str], *, strict: bool) -> Config:
    try:
        return msgspec.convert(values, Config, strict=strict)
    except msgspec.ValidationError as exc:
        problem, key = str(exc), ""
        if " - at `$" in problem:
            problem, _, place = problem.partition(" - at `$")
            key = place.rstrip("`").lstrip(".")
        if "unknown field" in problem:
            key = ".".join(part for part in (key, problem.split("`")[1]) if part)
            problem = "no such key; `edge_rt config show` lists them all"
        else:
            problem = f"{problem}, got {_get(values, key)!r}"
        origin = next((o for k, o in origins.items() if k == key or k.startswith(key + ".")), "configuration")
        raise ConfigError(key=key or "configuration", problem=problem, origin=origin) from exc


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for name in tables:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(key=key, problem=f"{name} is a value, not a table", origin=key)
        values = child
    values[last] = value


def _get(values: Any, key: str) -> Any:
    for name in key.split(".") if key else ():
        values = values.get(name) if isinstance(values, dict) else None
    return values
