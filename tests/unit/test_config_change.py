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
        except config.ConfigError:
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
