from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from edge_rt import config
from edge_rt.errors import ConfigError
from edge_rt.power import settings
from edge_rt.power.settings import Settings


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    return str(tmp_path / "config.toml")


def test_keys_and_defaults_are_the_daemons() -> None:
    assert msgspec.to_builtins(config.Power()) == msgspec.to_builtins(Settings())
    (actuators, _) = get_args(get_type_hints(config.Power)["actuators"])
    assert get_args(actuators) == settings.ACTUATORS


TABLES: list[dict[str, Any]] = [
    {"meter": "none"},
    {"meter": 3},
    {"enabled": True},
    {"enabled": 1},
    {"enabled": "true"},
    {"max_w": 0},
    {"max_w": 15},
    {"max_w": 15.5},
    {"max_w": -1.0},
    {"max_w": True},
    {"max_w": "15"},
    {"max_w": float("nan")},
    {"max_w": float("inf")},
    {"max_w": 10**400},
    {"battery_w": -0.5},
    {"max_c": 30.0},
    {"max_c": 29.9},
    {"max_c": 120.0},
    {"max_c": 120.5},
    {"interval_s": 0.02},
    {"interval_s": 0.01},
    {"interval_s": 1.5},
    {"ttft_slo_s": 0.0},
    {"ttft_slo_s": 0.001},
    {"tpot_slo_s": -1.0},
    {"actuators": []},
    {"actuators": ["cpufreq", "rapl"]},
    {"actuators": ["fan"]},
    {"actuators": [1]},
    {"actuators": "cpufreq"},
    {"socket_path": ""},
    {"nonsense": 1},
    {"max_w": 3.0, "force": True, "cap_group": "wheel"},
]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_powerd_takes_what_the_daemon_takes(table: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, _toml(table))
    theirs = outcome(lambda: config.load(Path(file), environ={}).config.power)
    ours = outcome(lambda: settings.load(file))
    if isinstance(theirs, ConfigError):
        assert isinstance(ours, ConfigError)
        assert (ours.key, ours.origin) == (theirs.key, file)
    else:
        assert ours == theirs


def outcome(load: Callable[[], Any]) -> Any:
    try:
        return msgspec.to_builtins(load())
    except ConfigError as exc:
        return exc


def _toml(table: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return repr(value).replace("'", '"')

    return "[power]\n" + "".join(f"{name} = {one(value)}\n" for name, value in table.items())


@pytest.mark.parametrize(
    ("text", "key"), [("power = 3", "power"), ("[power", "TOML"), ("x = [" * 5000, "TOML"), ("#\ud800", "TOML")]
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        settings.load(str(tmp_path / "config.toml"))
    assert caught.value.key == key


def test_a_file_that_cannot_be_read_or_is_endless_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        settings.load(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="not a regular file"):
        settings.load("/dev/zero")


def test_other_tables_are_not_its_business(tmp_path: Path) -> None:
    assert settings.load(write(tmp_path, "[server]\nnonsense = 1\n")) == Settings()
    assert settings.load(None) == Settings()


def test_which_file_is_read(tmp_path: Path) -> None:
    here = write(tmp_path, "")
    assert settings.find("/a", {"EDGE_RT_CONFIG": "/b"}, here) == "/a"
    assert settings.find(None, {"EDGE_RT_CONFIG": "/b"}, here) == "/b"
    assert settings.find(None, {}, here) == here
    assert settings.find(None, {}, str(tmp_path / "none")) is None
