from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_rt import config
from edge_rt.config import CloudEndpoint, Config, Loaded, ModelSettings
from edge_rt.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(
    file: Path | None = None, toml: str = "", environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> Loaded:
    if file is not None:
        file.write_text(toml, encoding="utf-8")
    return config.load(file, environ=environ or {}, flags=flags, system_file=Path("/nonexistent/config.toml"))


def failure(*args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return caught.value


PINS = '[engine]\nn_ctx = 512\n\n[[pin]]\nmodel = "m"\nsystem = """\nBe brief."""\n\n'


@pytest.mark.parametrize(
    ("second", "key", "problem"),
    [
        ('model = "m"', "pin[1]", "neither system nor file is given, or it is empty"),
        ('model = "m"\nsystem = ""', "pin[1]", "neither system nor file is given, or it is empty"),
        ('model = "m"\nsystem = "a"\nfile = "b"', "pin[1]", "both system and file are given; leave one out"),
        ('model = "m"\nsystem = "a"\nname = "pin-1"', "pin[1].name", "m has a pin named 'pin-1' already, pin[0]"),
        ('system = "a"', "pin[1]", "missing required field"),
        ('model = 3\nsystem = "a"', "pin[1].model", "Expected `str`, got 3"),
        ('model = "m"\nsystem = "a"\nname = "a b"', "pin[1].name", "got 'a b'"),
        ('model = "m"\nsystm = "a"', "pin[1].systm", "no such key; a pin has model, name, system, file"),
    ],
)
def test_what_is_wrong_with_a_pin_is_told_with_its_field_and_line(
    file: Path, second: str, key: str, problem: str
) -> None:
    error = failure(file, f"{PINS}[[ pin ]]\n{second}\n")
    assert (error.key, error.origin) == (key, f"{file}, line 9")
    assert problem in error.problem


def test_a_text_that_looks_like_a_pin_makes_no_line_wrong(file: Path) -> None:
    error = failure(file, f'{PINS}[[pin]]\nmodel = "m"\nsystem = """\n[[pin]]\n"""\nfile = "x"\n')
    assert (error.key, error.origin) == ("pin[1]", str(file))


def test_pins_are_named_after_their_files_or_numbers(file: Path) -> None:
    loaded = load(file, f'{PINS}[[pin]]\nmodel = "m"\nfile = "/etc/house.txt"\n[[pin]]\nmodel = "n"\nsystem = "x"\n')
    names = [config.pin_name(pin, number) for number, pin in enumerate(loaded.config.pin)]
    assert names == ["pin-1", "house.txt", "pin-3"]
    assert loaded.pin_places == (f"{file}, line 4", f"{file}, line 9", f"{file}, line 12")


def test_nothing_set_gives_the_defaults() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert {setting.origin for setting in loaded.settings()} == {"default"}


def test_each_layer_wins_over_the_one_below(file: Path) -> None:
    toml = "[engine]\nn_ctx = 1\nn_batch = 100\nn_parallel = 3\n"
    environ = {"EDGE_RT__ENGINE__N_CTX": "2", "EDGE_RT__ENGINE__N_BATCH": "200"}
    loaded = load(file, toml, environ, {"engine.n_ctx": 3, "engine.n_threads": None})
    engine = loaded.config.engine
    assert (engine.n_ctx, engine.n_batch, engine.n_parallel, engine.n_threads) == (3, 200, 3, 0)
    origins = {setting.key: setting.origin for setting in loaded.settings()}
    assert origins["engine.n_ctx"] == "flag"
    assert origins["engine.n_batch"] == "env EDGE_RT__ENGINE__N_BATCH"
    assert origins["engine.n_parallel"] == str(file)
    assert origins["engine.n_threads"] == "default"


def test_environment_values_are_converted_from_text() -> None:
    environ = {
        "EDGE_RT__SERVER__ACCESS_LOG": "false",
        "EDGE_RT__SERVER__DRAIN_S": "2.5",
        "EDGE_RT__LIMITS__MAX_STOP": "7",
        "EDGE_RT__CATALOG__MANIFEST_DIRS": "/a:/b",
    }
    read = load(environ=environ).config
    assert read.server.access_log is False
    assert read.server.drain_s == 2.5
    assert read.limits.max_stop == 7
    assert read.catalog.manifest_dirs == ("/a", "/b")


def test_an_empty_list_in_the_environment_empties_the_files(file: Path) -> None:
    loaded = load(file, '[catalog]\nmanifest_dirs = ["/a"]', {"EDGE_RT__CATALOG__MANIFEST_DIRS": ""})
    assert loaded.config.catalog.manifest_dirs == ()


def test_other_variables_are_left_alone() -> None:
    assert load(environ={"EDGE_RT": "1", "EDGE_RTX__A": "1", "PATH": "/bin"}).config == Config()


@pytest.mark.parametrize(
    ("toml", "key", "says"),
    [
        ("[engine]\nn_ctx = '2048'", "engine.n_ctx", "Expected `int`, got '2048'"),
        ("[engine]\nn_ctx = -1", "engine.n_ctx", "Expected `int` >= 0, got -1"),
        ("[engine]\nn_ctxx = 1", "engine.n_ctxx", "no such key; did you mean engine.n_ctx?"),
        ("[wifi]\nssid = 'x'", "wifi", "no such key; `edge_rt config show` lists them all"),
        ("engine = 3", "engine", "Expected a table, got 3"),
        ("[server]\ndrain_s = nan", "server.drain_s", "Expected `float` >= 0.0, got nan"),
        ("[server]\ndrain_s = inf", "server.drain_s", "must be finite, got inf"),
        ("[worker]\nstep_timeout_s = 0.0", "worker.step_timeout_s", "Expected `float` > 0.0, got 0.0"),
        ("[models.m]\nn_parallel = 257", "models.m.n_parallel", "Expected `int` <= 256, got 257"),
        ("[worker]\nkeep_alive_s = nan", "worker.keep_alive_s", "must be finite, got nan"),
        ("[server]\nsocket_mode = 'rw-rw----'", "server.socket_mode", "got 'rw-rw----'"),
        ("[log]\nlevel = 'loud'", "log.level", "Expected one of debug, info, warning, error, got 'loud'"),
        (
            "[engine]\nbackend = 'nativ'",
            "engine.backend",
            "null, got 'nativ'",
        ),
        (
            "[models.m]\nbackend = 'gpu'",
            "models.m.backend",
            "null, got 'gpu'",
        ),
        (
            "[power]\nactuators = ['cpufreq', 'fan']",
            "power.actuators",
            "Expected one of cpufreq, devfreq, epp, rapl, got ['cpufreq', 'fan']",
        ),
        ("[router]\nroute = 'moon'", "router.route", "Expected one of auto, local, cloud, got 'moon'"),
        (
            "[router.tenants]\n'uid:1' = 'local'\n'uid:2' = 'moon'",
            'router.tenants."uid:2"',
            "Expected one of auto, local, cloud, got 'moon'",
        ),
        ("[router.tenants]\n'uid:1' = 3", 'router.tenants."uid:1"', "Expected `str`, got 3"),
        ("[router]\ntenants = 'local'", "router.tenants", "Expected a table, got 'local'"),
        (
            "[cloud.a]\nmax_tokens_field = 'n'",
            "cloud.a.max_tokens_field",
            "Expected one of max_tokens, max_completion_tokens, got 'n'",
        ),
        ("[npu]\nsoc = { npu_qmm = '57' }", "npu.soc", "names that are one of npu_qnn, "),
        ("[npu]\noptions = { vtcm_mb = '8' }", "npu.options", "matching regex"),
        ("[npu]\nrequire = 'always'", "npu.require", "Expected one of npu, prefer, any, got 'always'"),
        ("models = 3", "models", "Expected a table, got 3"),
        ('[models.good]\n[models."a.b"]\nn_ctx = "x"', 'models."a.b".n_ctx', "Expected `int`, got 'x'"),
        ('[models."a.b"]\nn_cxt = 1', 'models."a.b".n_cxt', 'no such key; did you mean models."a.b".n_ctx?'),
    ],
)
def test_a_bad_file_names_key_value_and_file(file: Path, toml: str, key: str, says: str) -> None:
    error = failure(file, toml)
    assert error.key == key
    assert says in error.problem
    assert error.origin == str(file)


@pytest.mark.parametrize(
    ("name", "value", "key", "says"),
    [
        ("EDGE_RT__ENGINE__N_CTX", "many", "engine.n_ctx", "Expected `int`, got 'many'"),
        ("EDGE_RT__ENGINE__N_CTX", "", "engine.n_ctx", "got ''"),
        ("EDGE_RT__ENGINE", "3", "engine", "Expected a table"),
        ("EDGE_RT__ENGIN__N_CTX", "3", "engin", "no such key"),
        ("EDGE_RT__SERVER__ACCESS_LOG", "yes", "server.access_log", "Expected `bool`"),
        ("EDGE_RT__SERVER__DRAIN_S", "inf", "server.drain_s", "must be finite"),
        ("EDGE_RT__ENGINE__N_CTX__DEEPER", "1", "engine.n_ctx", "Expected `int`"),
        ("EDGE_RT__", "1", '""', "no such key"),
    ],
)
def test_a_bad_variable_is_named(file: Path, name: str, value: str, key: str, says: str) -> None:
    error = failure(file, "[engine]\nn_batch = 64", {name: value})
    assert error.key == key
    assert says in error.problem
    assert error.origin == f"env {name}"


def test_a_value_and_a_table_of_the_same_name_clash() -> None:
    error = failure(environ={"EDGE_RT__ENGINE": "3", "EDGE_RT__ENGINE__N_CTX": "4"})
    assert error.origin == "env EDGE_RT__ENGINE__N_CTX"
    assert error.problem == "engine is a value, not a table"


def test_a_bad_flag_is_named() -> None:
    error = failure(flags={"engine.n_parallel": 1000})
    assert (error.key, error.origin) == ("engine.n_parallel", "flag")
    assert "<= 256, got 1000" in error.problem


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"[engine", "TOML"),
        (b"a = 1\na = 2", "TOML"),
        (b"a = '\xff'", "TOML"),
        (b"a = " + b"[" * 5000, "TOML"),
        (None, "configuration file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(file: Path, content: bytes | None, key: str) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(file, environ={})
    assert (caught.value.key, caught.value.origin) == (key, str(file))


def test_the_file_is_the_named_one_else_the_variables_else_the_systems(tmp_path: Path) -> None:
    named, variables, systems = (tmp_path / name for name in ("named.toml", "variables.toml", "systems.toml"))
    for n, path in enumerate((named, variables, systems), start=1):
        path.write_text(f"[engine]\nn_ctx = {n}")
    environ = {"EDGE_RT_CONFIG": str(variables)}
    assert config.load(named, environ=environ, system_file=systems).config.engine.n_ctx == 1
    assert config.load(environ=environ, system_file=systems).config.engine.n_ctx == 2
    assert config.load(environ={}, system_file=systems).config.engine.n_ctx == 3
    systems.unlink()
    assert config.load(environ={}, system_file=systems).config.engine.n_ctx == 0


def test_a_variable_finds_the_files_model_whatever_its_spelling(file: Path) -> None:
    toml = '[models."Qwen2.5-0.5B"]\nn_ctx = 512\npreload = true\n'
    loaded = load(file, toml, {"EDGE_RT__MODELS__QWEN2_5_0_5B__N_CTX": "1024"})
    assert loaded.config.models == {"Qwen2.5-0.5B": ModelSettings(n_ctx=1024, preload=True)}
    origins = {setting.key: setting.origin for setting in loaded.settings()}
    assert origins['models."Qwen2.5-0.5B".n_ctx'] == "env EDGE_RT__MODELS__QWEN2_5_0_5B__N_CTX"
    assert origins['models."Qwen2.5-0.5B".preload'] == str(file)


def test_a_variable_alone_names_a_model() -> None:
    read = load(environ={"EDGE_RT__MODELS__QWEN2_5_0_5B__KEEP_ALIVE_S": "-1"}).config
    assert read.model("qwen2.5-0.5b") == ModelSettings(keep_alive_s=-1.0)
    assert read.model("qwen2.5-1.5b") == ModelSettings()
    assert read.unknown_models(["qwen2.5-0.5b"]) == ()
    assert read.unknown_models(["qwen2.5-1.5b"]) == ("qwen2_5_0_5b",)


def test_a_variable_that_could_mean_two_models_fails(file: Path) -> None:
    error = failure(file, '[models."a-b"]\n[models."a.b"]\n', {"EDGE_RT__MODELS__A_B__N_CTX": "1"})
    assert error.problem == "stands for each of a-b, a.b"


def test_a_flag_can_set_a_model_with_a_dot_in_its_id() -> None:
    read = load(flags={'models."a.b".n_ctx': 7, "models.c-d.n_ctx": 8}).config
    assert read.model("a.b").n_ctx == 7
    assert read.model("c-d").n_ctx == 8


@pytest.mark.parametrize("key", [("engine", "n_ctx"), ("models", "a.b", "n_ctx"), ("models", "a b")])
def test_a_dotted_key_can_be_read_back(key: config.Key) -> None:
    assert config.parse_key(config.dotted(key)) == key


def test_the_example_lists_every_key_with_its_default(tmp_path: Path) -> None:
    loaded = config.load(EXAMPLE, environ={})
    assert loaded.config == Config()
    assert [setting.key for setting in loaded.settings() if setting.origin == "default"] == ["cloud", "models", "pin"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("models.smollm2-135m-instruct", ModelSettings(keep_alive_s=300.0)),
        ("cloud.example", CloudEndpoint()),
    ],
)
def test_the_examples_tables_of_tables_list_every_key(file: Path, name: str, expected: msgspec.Struct) -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"# [{name}]")
    table = "\n".join(line.removeprefix("# ") for line in takewhile(bool, lines[start:]))
    loaded = load(file, table)
    kind, _, member = name.partition(".")
    assert getattr(loaded.config, kind)[member] == expected
    keys = [setting.key.split(".")[-1] for setting in loaded.settings() if setting.origin == str(file)]
    assert keys == list(expected.__struct_fields__)


def test_a_fault_in_a_table_inside_a_models_table_is_named(file: Path) -> None:
    for fault, key in (("", "models.m.adapters.b"), ("file = 1\n", "models.m.adapters.b.file")):
        error = failure(file, f'[models.m.adapters.a]\nfile = "x"\n[models.m.adapters.b]\n{fault}')
        assert error.key == key
    for name in ("", "a:b", "a\\u0000b", "a b", "-", "x" * 65):
        error = failure(file, f'[models.m.adapters."{name}"]\nfile = "x"\n')
        assert error.key.startswith("models.m.adapters")
    adapters = load(file, '[models.m.adapters.a]\nfile = "x"\n').config.model("m").adapters
    assert adapters["a"].file == "x"


def test_a_fault_in_a_cloud_table_is_named(file: Path) -> None:
    error = failure(file, "[cloud.big]\nprice_in = -1.0\n")
    assert (error.key, "Expected `float` >= 0.0" in error.problem) == ("cloud.big.price_in", True)
    assert "did you mean cloud.big.base_url" in failure(file, '[cloud.big]\nbase_ur = "x"\n').problem


def test_a_file_that_was_named_is_what_back_ends_and_children_read(file: Path) -> None:
    file.write_text("[fpga]\nbitstream = '/x/e4.bit'\n")
    with config.named(file):
        assert config.load().config.fpga.bitstream == "/x/e4.bit"
        with config.named(None):
            assert config.load().config.fpga.bitstream == "/x/e4.bit"
    assert config.load(system_file=Path("/none")).config.fpga.bitstream == ""
