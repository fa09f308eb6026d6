"""What can be set: one frozen struct for each table of the file, with its defaults and ranges.

An empty string or 0 means "choose for this machine" where the comment says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edge_rt.tensor_types import Require
from edge_rt.types import Route

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0)]
# auto, and the names of edge_rt.backends.registry
Backend = Literal[
    "auto",
    "native",
    "llama_cpu",
    "onnx_cpu",
    "fpga",
    "fpga_sim",
    "npu_qnn",
    "npu_openvino",
    "npu_rknn",
    "npu_serial",
    "null",
]
NpuName = Literal["npu_qnn", "npu_openvino", "npu_rknn", "npu_serial"]
NpuOption = Annotated[str, Meta(pattern=r"^npu_[a-z]+\.\w+\Z")]
# upper clocks of CPUs; of NPUs, GPUs and memory; the energy preference; the chip's own power limit
Actuator = Literal["cpufreq", "devfreq", "epp", "rapl"]
AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]  # MODEL:ADAPTER names it
# as udev names it, with its speed in baud (921,600)
SerialPort = Annotated[str, Meta(pattern=r"^/[^\0@]{1,200}(@[0-9]{4,8})?\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Mode = Annotated[str, Meta(pattern=r"^0?[0-7]{3}\Z")]


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
    max_choices: Positive = 32  # answers that one request gets, to all its prompts
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
    min_draft: Annotated[int, Meta(ge=0, le=64)] = 0  # fewer tokens that a draft model has guessed are not checked
    min_draft_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # a draft model that is less sure of a guess stops there
    # finished prompts kept for requests that begin the same; 0 keeps none, -1 as memory allows, at most 2 GiB a model
    max_prefix_bytes: Annotated[int, Meta(ge=-1)] = -1
    max_prefix_disk_bytes: Count = 2**30  # of these, kept beside each model for the next start; 0: none
    isolate_prefixes: bool = False  # no prompt begins with what another user's has computed; see docs/scheduling.md
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


class Npu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    require: Require | Literal[""] = ""  # "": the manifest's, else prefer; see docs/npu.md
    max_artifact_bytes: Count = 2 * 2**30  # of one model's compiled forms, kept beside it; 0 keeps none
    retry_s: PositiveSeconds = 0.8  # until a chip that failed is tried again; doubles with each failure, up to 5 times
    soc: dict[NpuName, str] = {}  # the chip by back end, where it cannot be found out: npu_qnn = "57:75"
    options: dict[NpuOption, str] = {}  # of vendors' stacks, by back end: "npu_qnn.htp_performance_mode" = "burst"
    # of boards with edge_rt's firmware; no other port is ever opened: "/dev/ttyACM0", "/dev/ttyUSB0@115200"
    serial_ports: tuple[SerialPort, ...] = ()


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


class Fpga(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bitstream: str = ""  # the .bit of hw/fpga/vivado, its .hwh beside it; "": the back end fpga has no board
    simulated: Literal["z2-gemv", "z2-gemm", "kv260-gemv", "kv260-gemm"] = "kv260-gemm"  # what fpga_sim simulates


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: Annotated[str, Meta(min_length=1)]  # a LoRA in GGUF
    base_sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""  # of the model's file that it was trained on


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    variant: str = ""  # "": the first form that runs fast on this CPU
    backend: Backend | Literal[""] = ""
    n_ctx: Count = 0
    n_parallel: Annotated[int, Meta(ge=0, le=256)] = 0
    keep_alive_s: float | None = None
    preload: bool = False
    draft: str = ""  # MODEL[:VARIANT] or a GGUF file that guesses tokens ahead; "": the manifest's, "none": none
    adapters: dict[AdapterName, AdapterSettings] = {}  # LoRA adapters that requests may name


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A system prompt that is computed when its model is loaded, and stays. One of system and file is set."""

    model: str
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,100}\Z")] = ""  # "": the file's, or pin-1, pin-2, …
    system: str = ""
    file: str = ""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: Server = Server()
    limits: Limits = Limits()
    engine: Engine = Engine()
    tensor: Tensor = Tensor()
    npu: Npu = Npu()
    placement: Placement = Placement()
    scheduler: Scheduler = Scheduler()
    worker: Worker = Worker()
    catalog: Catalog = Catalog()
    cache: Cache = Cache()
    router: Router = Router()
    cloud: dict[str, CloudEndpoint] = {}
    power: Power = Power()
    fpga: Fpga = Fpga()
    log: Log = Log()
    models: dict[str, ModelSettings] = {}
    pin: tuple[Pin, ...] = ()

    def model(self, model_id: str) -> ModelSettings:
        """Give one model's own settings, all defaults where it has none."""
        if model_id in self.models:
            return self.models[model_id]
        return next((s for name, s in self.models.items() if plain_id(name) == plain_id(model_id)), ModelSettings())

    def unknown_models(self, known: Iterable[str]) -> tuple[str, ...]:
        """List the [models.*] tables that name none of the known ids."""
        plain = {plain_id(model_id) for model_id in known}
        return tuple(name for name in self.models if plain_id(name) not in plain)


NAMED: dict[str, type[msgspec.Struct]] = {"models": ModelSettings, "cloud": CloudEndpoint}  # tables of tables


def plain_id(model_id: str) -> str:
    """Write a model's id as the name of an environment variable can have it."""
    return re.sub(r"[^a-z0-9]", "_", model_id.lower())
