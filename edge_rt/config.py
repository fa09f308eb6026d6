"""One TOML file to frozen structs: default < file < environment EDGE_RT__A__B < flag. Unknown keys fail.

No probing and no directories made here: what depends on the machine is resolved in runtime and daemon.
An empty string or 0 means "choose for this machine" where the comment says so.

In EDGE_RT__MODELS__SMOLLM2_135M_INSTRUCT__N_CTX the model's id is written as a shell allows: case is ignored and _
stands for any of - . _. Lists are separated by colons, as in PATH.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from edge_rt.errors import ConfigError
from edge_rt.regular import read_regular
from edge_rt.types import Route

_PREFIX = "EDGE_RT__"
SYSTEM_FILE = Path("/etc/edge_rt/config.toml")
_MAX_BYTES = 2**20

Key = tuple[str, ...]  # ("models", "qwen2.5-0.5b", "n_ctx"); shown as TOML writes it, see dotted

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0)]
# auto, and the names of edge_rt.backends.registry
Backend = Literal["auto", "native", "llama_cpu", "onnx_cpu", "null"]
# upper clocks of CPUs; of NPUs, GPUs and memory; the energy preference; the chip's own power limit
Actuator = Literal["cpufreq", "devfreq", "epp", "rapl"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Mode = Annotated[str, Meta(pattern="^0?[0-7]{3}$")]


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket_path: str = ""  # "": $RUNTIME_DIRECTORY, else /run/edge_rt (root), else $XDG_RUNTIME_DIR/edge_rt
    socket_mode: Mode = "0660"
    socket_group: str = ""  # "": the daemon's own group
    tcp_host: str = ""  # "": no TCP; otherwise api_keys_file is required
    tcp_port: Port = 8970
    api_keys_file: str = ""  # one key a line, '#' comments
    grpc_socket_path: str = ""  # "": no gRPC; its mode and group are those above
    shm_socket_path: str = ""  # "": no shared memory; its mode and group are those above
    max_regions: Positive = 64  # of shared memory
    max_regions_bytes: Positive = 1024 * 2**20
    max_body_bytes: Positive = 4 * 2**20
    max_file_bytes: Positive = 16 * 2**20  # of a picture or recording with its form fields, instead of max_body_bytes
    max_bodies_bytes: Positive = 32 * 2**20  # of all the requests that are being received or answered
    max_connections: Positive = 512  # beyond, idle ones are closed
    drain_s: Seconds = 4.0  # on SIGTERM, how long running answers may go on
    access_log: bool = True


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_messages: Positive = 512
    max_prompt_bytes: Positive = 2 * 2**20
    max_stop: Positive = 16
    max_stop_bytes: Positive = 256
    max_logit_bias: Positive = 1024
    max_top_logprobs: Count = 20
    max_tensor_bytes: Positive = 64 * 2**20  # of one request's inputs together
    max_pixels: Positive = 50_000_000  # of a picture, once decoded
    max_audio_s: PositiveSeconds = 3600.0


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: Backend = "auto"  # auto: native where it supports the model, else llama_cpu; a name: that one or none
    n_ctx: Count = 0  # 0: the manifest's
    n_parallel: Annotated[int, Meta(ge=1, le=256)] = 8  # sequences decoded together
    n_batch: Annotated[int, Meta(ge=32, le=8192)] = 512  # rows of one step, n_parallel at least
    n_threads: Count = 0  # 0: chosen and changed by measured step time
    max_stall_s: PositiveSeconds = 0.15  # a prefill chunk may delay running streams this long
    max_draft: Annotated[int, Meta(ge=0, le=64)] = 15  # tokens guessed and checked in one step; 0: none
    max_prefix_bytes: Count = 128 * 2**20  # finished prompts kept for requests that begin the same; 0 keeps none
    stream_interval_s: Seconds = 0.05  # tokens that come faster share one event; the first never waits
    kv_type: Literal["f16", "q8_0"] = "f16"
    packed_copy: bool = True  # keep packed weights on disk beside the model: as large as it, and loads take no time


class Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    n_threads: Count = 0  # 0: the usable big cores
    max_batch: Count = 0  # rows that requests for one model are joined to; 0: the manifest's, 1: never
    max_delay_s: float = -1.0  # how long a request waits for others to join; negative: the manifest's
    max_shapes: Positive = 8  # shapes of dynamic inputs that are prepared for at a time
    max_streams: Positive = 256  # of a stateful model, least recently used out first
    n_parallel: Annotated[int, Meta(ge=1, le=4096)] = 64  # requests of one model inside its worker
    graph_cache: bool = True  # keep the optimised graph on disk beside the model
    custom_op_libraries: tuple[str, ...] = ()  # files whose operators models may use; they run as code


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: Literal["latency", "energy", "balanced"] = "balanced"
    profile_file: str = ""  # "": profile.json in the store
    n_checked: Count = 8  # results of a new device that are compared with the CPU's
    tolerance: Annotated[float, Meta(ge=0.0)] = 0.02  # largest difference allowed, of the output's largest value
    max_failures: Positive = 3  # one after the other, then the device is left alone
    retry_s: PositiveSeconds = 2.0  # until one request tries again; doubles with each failure, up to 5 times
    max_device_c: PositiveSeconds = 85.0  # a hotter device comes last …
    cool_by_c: Seconds = 5.0  # … until it has cooled by so much below that
    probe_s: PositiveSeconds = 2.0  # between two readings of the devices in use; longer where one takes long


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_waiting: Count = 64
    max_waiting_per_tenant: Count = 0  # 0: no limit of its own
    queue_timeout_s: Seconds = 120.0


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep_alive_s: float = 300.0  # unload after this long idle; negative: never
    load_timeout_s: PositiveSeconds = 180.0
    step_timeout_s: PositiveSeconds = 60.0  # a worker silent for longer in the middle of work is killed
    memory_margin_bytes: Count = 256 * 2**20  # left free when a model is loaded; kept prefixes come out of it
    force: bool = False  # load a model although the memory looks too small for it
    max_loaded: Positive = 4


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store_dir: str = ""  # "": $STATE_DIRECTORY, else /var/lib/edge_rt (root), else the user's data directory
    manifest_dirs: tuple[str, ...] = ()  # searched before the manifests that come with edge_rt
    default_model: str = "smollm2-135m-instruct"
    hub_endpoint: str = "https://huggingface.co"
    hub_token_file: str = ""
    offline: bool = False


class Cache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = True  # answers that a request would get again are kept: greedy or seeded ones
    store_file: str = ""  # "": cache.sqlite in the store
    max_bytes: Positive = 256 * 2**20
    max_answer_bytes: Positive = 2**20  # a larger answer is not kept
    ttl_s: PositiveSeconds = 24 * 3600.0
    volatile_ttl_s: PositiveSeconds = 60.0  # of answers to questions about today or now
    isolate: bool = True  # nobody gets an answer that another user asked for
    sampled: bool = False  # also answers drawn without a seed
    tensors: bool = False  # also outputs of tensor models
    similar_frames: Count = 0  # bits of 64 in which two pictures' hashes may differ to count as one; 0: only equal ones
    semantic: Literal["off", "shadow", "on"] = "off"  # answers to questions that mean the same; shadow only measures
    max_error: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.02  # share of all requests that may get a wrong answer so
    verify_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.08  # of would-be hits that are computed and compared
    max_semantic: Positive = 20_000  # questions searched


class Router(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    route: Route = "auto"  # of requests that ask for none; cloud only where [cloud.NAME] has an endpoint
    cloud_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.4  # of requests, that the router may send
    max_cost_per_day: Annotated[float, Meta(ge=0.0)] = 0.0  # in the currency of the prices; 0: no limit
    tenants: dict[str, Route] = {}  # of single users' requests that ask for none: "uid:1000" = "local"
    offline: bool = False  # send nothing
    metered: bool = False  # the network is paid by the byte: send only what the device cannot do
    min_battery: Annotated[float, Meta(ge=0.0, le=1.0)] = (
        0.2  # with less charge, the cloud decodes rather than the device
    )
    max_energy_j_per_day: Annotated[float, Meta(ge=0.0)] = (
        0.0  # of the device's answers; beyond, the cloud; 0: no limit
    )
    keep_private: tuple[str, ...] = ("secret", "card", "iban", "email", "phone", "directive")  # what never leaves
    private_words: tuple[str, ...] = ()  # names of fields that never leave either
    scorer: bool = True  # judge difficulty before decoding; needs edge_rt[vectors]
    hold_back_tokens: Count = 16  # of an answer's beginning, until its confidence is known; 0: no second thoughts
    shadow_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # of local answers that the cloud judges, to learn
    hedge: bool = False  # ask the cloud too when the device is late


class CloudEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_url: str = ""  # of an OpenAI-compatible API, with /v1; or unix:PATH
    model: str = ""
    api_key_file: str = ""  # or a systemd credential: credential:NAME
    priority: int = 0  # lower ones are asked first
    n_ctx: Count = 0  # 0: not known
    price_in: Annotated[float, Meta(ge=0.0)] = 0.0  # of a million prompt tokens
    price_out: Annotated[float, Meta(ge=0.0)] = 0.0  # of a million tokens of answer
    connect_timeout_s: PositiveSeconds = 3.0
    first_byte_timeout_s: PositiveSeconds = 20.0
    next_byte_timeout_s: PositiveSeconds = 20.0
    timeout_s: PositiveSeconds = 300.0  # of the whole answer
    retry_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1  # retries, of requests
    max_failures: Positive = 3  # one after the other, then it is left alone
    retry_s: PositiveSeconds = 5.0  # until one request tries again
    slow_s: PositiveSeconds = 15.0  # a first byte later than this counts as a failure
    ca_file: str = ""  # "": the system's
    allow_private: bool = False  # addresses of the local network may be asked
    allow_http: bool = False  # without TLS; for a peer on a Unix socket it is not needed
    full_sampling: bool = False  # send top_k, min_p and repeat_penalty too: llama-server and edge_rt know them
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # newer models want the longer one


class Power(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    meter: str = "auto"  # auto: the best that is here; none; model; one of `edge_rt power status`; serial:PORT:KIND
    ttft_slo_s: PositiveSeconds = 1.0  # first token, wanted of 95 of 100 answers
    tpot_slo_s: PositiveSeconds = 0.1  # each further token
    socket_path: str = "/run/edge_rt/power.sock"  # powerd's; "": tell it nothing
    # What follows is powerd's, which reads the same file (edge_rt/power/settings.py has the same keys).
    socket_group: str = "edge_rt"  # whose members may connect and give hints
    enabled: bool = False  # set clocks; else powerd only says what it would set
    force: bool = False  # also beside another power manager
    actuators: tuple[Actuator, ...] = ("cpufreq",)  # what it may set
    max_w: Annotated[float, Meta(ge=0.0)] = 0.0  # 0: no cap
    battery_w: Annotated[float, Meta(ge=0.0)] = 0.0  # the cap on battery; 0: max_w
    cap_group: str = ""  # whose members may set a cap while it runs, besides root; "": nobody's
    max_c: Annotated[float, Meta(ge=30.0, le=120.0)] = 80.0  # of the chip
    interval_s: Annotated[float, Meta(ge=0.02, le=1.0)] = 0.05  # between two looks while there is work
    model_file: str = ""  # of `edge_rt power calibrate`; "": power.json in /var/lib/edge_rt


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    variant: str = ""  # "": the first form that runs fast on this CPU
    backend: Backend | Literal[""] = ""
    n_ctx: Count = 0
    n_parallel: Annotated[int, Meta(ge=0, le=256)] = 0
    keep_alive_s: float | None = None
    preload: bool = False


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: Server = Server()
    limits: Limits = Limits()
    engine: Engine = Engine()
    tensor: Tensor = Tensor()
    placement: Placement = Placement()
    scheduler: Scheduler = Scheduler()
    worker: Worker = Worker()
    catalog: Catalog = Catalog()
    cache: Cache = Cache()
    router: Router = Router()
    cloud: dict[str, CloudEndpoint] = {}
    power: Power = Power()
    log: Log = Log()
    models: dict[str, ModelSettings] = {}

    def model(self, model_id: str) -> ModelSettings:
        """Give one model's own settings, all defaults where it has none."""
        if model_id in self.models:
            return self.models[model_id]
        return next((s for name, s in self.models.items() if _plain(name) == _plain(model_id)), ModelSettings())

    def unknown_models(self, known: Iterable[str]) -> tuple[str, ...]:
        """List the [models.*] tables that name none of the known ids."""
        plain = {_plain(model_id) for model_id in known}
        return tuple(name for name in self.models if _plain(name) not in plain)


_NAMED: dict[str, type[msgspec.Struct]] = {"models": ModelSettings, "cloud": CloudEndpoint}  # tables of tables


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
    if (path := _find(file, environ, system_file)) is not None:
        values = _read(path)
        origins = {key: str(path) for key, _ in _flatten(values)}
        _convert(values, origins, strict=True)
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
    config = _convert(values, origins, strict=False)
    return Loaded(config=config, origins={dotted(key): origin for key, origin in origins.items()})


def dotted(key: Key) -> str:
    """Write a key as TOML does: a part with a dot in it is quoted."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in key)


def parse_key(text: str) -> Key:
    """Split what dotted wrote."""
    return tuple(quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^."]+)', text)) or (text,)


def _plain(model_id: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", model_id.lower())


def _find(file: Path | None, environ: Mapping[str, str], system_file: Path) -> Path | None:
    if file is not None:
        return file
    if name := environ.get("EDGE_RT_CONFIG"):
        return Path(name)
    return system_file if os.path.lexists(system_file) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, _MAX_BYTES).decode("utf-8"))
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
        same = [model_id for model_id in models if _plain(model_id) == _plain(rest[0])]
        if len(same) > 1:
            raise ConfigError(key=name, problem=f"stands for each of {', '.join(same)}", origin=origin)
        rest[:1] = same or rest[:1]
    return (table, *rest)


def _split_list(key: Key, value: str) -> str | list[str]:
    default: Any = Config()
    for part in key:
        default = getattr(default, part, None)
    return [part for part in value.split(os.pathsep) if part] if isinstance(default, tuple) else value


def _convert(values: dict[str, Any], origins: Mapping[Key, str], *, strict: bool) -> Config:
    try:
        config = msgspec.convert(values, Config, strict=strict)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$")
        key = _locate(values, place.rstrip("`"), strict=strict)
        if "unknown field" in problem:
            key = (*key, problem.split("`")[1])
            problem = "no such key" + _suggest(key)
        else:
            if "enum" in problem:
                problem = f"Expected one of {', '.join(_choices(key))}"
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
            kind: Any = _NAMED[key[0]] if key[0] in _NAMED else get_type_hints(type(getattr(Config(), key[0])))[key[1]]
            if key[0] not in _NAMED:  # a table of plain values: any of them
                (_, kind) = get_args(kind)
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
    if key[0] in _NAMED and len(key) > 2:
        known = [dotted((*key[:2], name)) for name in _NAMED[key[0]].__struct_fields__]
    near = difflib.get_close_matches(dotted(key), known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "; `edge_rt config show` lists them all"


def _choices(key: Key) -> tuple[str, ...]:
    table: type[Any] = _NAMED[key[0]] if key[0] in _NAMED else type(getattr(Config(), key[0]))
    kind: Any = get_type_hints(table)[key[-1] if key[0] in _NAMED else key[1]]
    if get_origin(kind) is dict:  # a table of plain values, of which one is wrong
        (_, kind) = get_args(kind)
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
