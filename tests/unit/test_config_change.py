from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt import config
from edge_rt.config import CloudEndpoint, Config, ModelSettings, dotted, parse_key
from edge_rt.config_change import _RULES, plan, when
from edge_rt.errors import ConfigError


def load(**flags: Any) -> Config:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return config.load(environ={}, flags=named, system_file=Path("/nonexistent/config.toml")).config


def all_keys() -> list[tuple[str, ...]]:
    with_tables = Config(cloud={"one": CloudEndpoint()}, models={"tiny": ModelSettings(keep_alive_s=1.0)})
    loaded = config.Loaded(config=with_tables, origins={})
    return [parse_key(setting.key) for setting in loaded.settings()]


@pytest.mark.parametrize("key", all_keys(), ids=dotted)
def test_every_key_has_a_rule(key: tuple[str, ...]) -> None:
    assert when(key) is not None


def test_every_rule_is_of_a_key_that_exists() -> None:
    known = all_keys()
    for rule in _RULES:
        assert any(all(part in ("*", own) for part, own in zip(rule, key, strict=False)) for key in known), rule


def test_nothing_changes_by_the_same() -> None:
    assert plan(load(), load()).changes == ()
    assert plan(load(), load()).lines() == ()


def test_what_can_change_does_and_what_needs_a_restart_stays() -> None:
    old = load(limits__max_stop=4)
    new = load(limits__max_stop=8, server__tcp_port=99, server__drain_s=1.0, engine__n_ctx=512, power__max_w=5.0)
    found = plan(old, new)
    assert found.keys("now") == ("limits.max_stop", "server.drain_s")
    assert found.keys("next load") == ("engine.n_ctx",)
    assert found.keys("restart") == ("server.tcp_port",)
    assert found.keys("powerd") == ("power.max_w",)
    assert found.config.limits.max_stop == 8
    assert found.config.server.tcp_port == old.server.tcp_port
    assert found.config.server.drain_s == 1.0
    assert found.lines()[-1] == "need a restart and stay as they were: server.tcp_port"


def another(key: tuple[str, ...], value: Any) -> Any:
    """Give a value of a key that is valid and not this one."""
    name = dotted(key)
    guesses = [not value] if isinstance(value, bool) else []
    guesses += [value + 1, value / 2, value + 0.25] if isinstance(value, int | float) else []
    guesses += (
        [["a"], [{"model": "m", "system": "s"}], ["cpufreq", "rapl"], ["email"], ["/dev/ttyACM0"]]
        if isinstance(value, list | tuple)
        else []
    )
    guesses += ["0640", "other", "null", "q8_0", "latency", "on", "local", "json", "debug", "max_completion_tokens"]
    guesses += ["npu", "z2-gemm", {"uid:1": "local"}, {"npu_qnn": "43:73"}, {"npu_qnn.vtcm_mb": "8"}]
    guesses += [{"a": {"file": "/a.gguf"}}]
    for guess in guesses:
        try:
            found = config.load(environ={}, flags=BASE | {name: guess}, system_file=Path("/nonexistent/config.toml"))
        except ConfigError:
            continue
        if dict(flat(found.config)).get(name) != value:
            return found.config
    raise AssertionError(f"no other value of {name} than {value!r} is known here")


def table_of(key: str) -> str:
    """Give a key without the names that another() has put into tables of any names."""
    for inside in ("uid:", "npu_qnn", "a.file", "a.base_sha256"):
        key = key.partition(inside)[0]
    return key.rstrip('."')


BASE = {"cloud.one.base_url": "https://a/v1", "models.tiny.keep_alive_s": 1.0}


def flat(of: Config) -> list[tuple[str, Any]]:
    return [(setting.key, setting.value) for setting in config.Loaded(config=of, origins={}).settings()]


@pytest.mark.parametrize("key", all_keys(), ids=dotted)
def test_every_key_that_changes_is_taken_up_or_named_as_waiting(key: tuple[str, ...]) -> None:
    """Never silent: in one line at least, and where a restart is needed the old value stays."""
    old = config.load(environ={}, flags=BASE, system_file=Path("/nonexistent/config.toml")).config
    name = dotted(key)
    before = dict(flat(old)).get(name)
    new = another(key, before)
    found = plan(old, new)
    assert {table_of(change.key) for change in found.changes} == {name}
    assert any(name in line for line in found.lines())
    holds = dict(flat(found.config))
    assert holds == dict(flat(old if found.changes[0].when == "restart" else new))


def test_grpcs_own_limit_is_named() -> None:
    old, new = load(server__grpc_socket_path="/g"), load(server__grpc_socket_path="/g", server__max_body_bytes=1000)
    found = plan(old, new)
    assert (found.keys("now"), found.keys("restart")) == (
        ("server.max_body_bytes",),
        ("server.max_body_bytes of gRPC",),
    )


def test_an_endpoint_comes_and_goes() -> None:
    one = {"cloud.one.base_url": "https://a/v1", "cloud.one.model": "m"}
    with_one = config.load(environ={}, flags=one, system_file=Path("/nonexistent/config.toml")).config
    assert set(plan(load(), with_one).config.cloud) == {"one"}
    assert plan(with_one, load()).config.cloud == {}
    assert plan(with_one, load()).keys("restart") == ()


def test_a_models_table_counts_at_its_next_load_unless_it_is_fixed() -> None:
    old, new = load(models__a__n_ctx=100), load(models__a__n_ctx=200, models__b__n_ctx=5)
    assert plan(old, new).config == new
    found = plan(old, new, fixed_models=["a", "b"])
    assert found.config == old
    assert "b" not in found.config.models
    assert {change.when for change in found.changes} == {"restart"}


def test_preload_and_places_for_requests_wait_for_a_restart() -> None:
    found = plan(load(), load(models__a__preload=True, models__a__n_parallel=3, models__a__n_ctx=64))
    assert set(found.keys("restart")) == {"models.a.preload", "models.a.n_parallel"}
    assert found.config.model("a") == ModelSettings(n_ctx=64)


@given(st.dictionaries(st.sampled_from(all_keys()), st.integers(1, 60), max_size=8))
def test_what_is_planned_differs_from_the_old_in_what_may_change_only(chosen: dict[tuple[str, ...], int]) -> None:
    """Random integers where they are valid; a value of another type is left out."""
    flags = {}
    for key, value in chosen.items():
        try:
            config.load(environ={}, flags={dotted(key): value}, system_file=Path("/nonexistent/config.toml"))
        except ConfigError:
            continue
        flags[dotted(key)] = value
    old, new = load(), config.load(environ={}, flags=flags, system_file=Path("/nonexistent/config.toml")).config
    found = plan(old, new)
    again = plan(old, found.config)
    assert again.keys("restart") == ()
    assert again.config == found.config
    assert {*found.keys("now"), *found.keys("next load"), *found.keys("powerd")} >= {
        change.key for change in again.changes
    }
    assert msgspec.to_builtins(found.config).keys() <= msgspec.to_builtins(new).keys()
