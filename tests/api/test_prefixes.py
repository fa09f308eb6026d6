"""Pinned prefixes through a real daemon and its worker, by HTTP and by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt.api.client import Client
from edge_rt.cli import main as cli
from edge_rt.errors import InvalidRequestError
from tests.api.daemon import Daemon
from tests.patience import until

SYSTEM = "You are the assistant of this house. " * 8
PIN = """
[[pin]]
model = "null"
name = "house"
file = "{file}"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("prefixes")
    (folder / "system.txt").write_text(SYSTEM)
    with Daemon(folder, extra=PIN.format(file=folder / "system.txt")) as running:
        yield running


def test_a_pin_that_makes_no_prompt_is_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM * 40)
    with Daemon(tmp_path, extra=PIN.format(file=tmp_path / "system.txt")) as running, Client(running.socket) as client:
        (pin,) = client.pins("null")
        assert (pin["name"], pin["is_kept"]) == ("config:house", False)
        assert "context" in pin["problem"]
        listed = CliRunner().invoke(cli, ["prefix", "--socket", str(running.socket), "--model", "null", "list"])
        assert f"config:house: {pin['problem']}" in listed.output
        metrics = client.metrics_text()
        assert 'edge_rt_pins_with_problem{model="null"} 1.0' in metrics


def cached(client: Client, system: str) -> int:
    body = {
        "model": "null",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "hello"}],
        "cache": {"tags": []},
    }
    answer = client._http.post("/v1/chat/completions", json=body, headers={"cache-control": "no-store"}).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_what_the_configuration_pins_is_computed_before_anybody_asks(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        until(lambda: [pin["is_kept"] for pin in client.pins("null")] == [True])
        (pin,) = client.pins("null")
        assert pin["name"] == "config:house"
        assert cached(client, SYSTEM) == pin["n_tokens"] >= len(SYSTEM)
        assert "edge_rt_pinned_prefixes" in client._http.get("/metrics").text


def test_a_prefix_is_pinned_and_unpinned(daemon: Daemon) -> None:
    other = SYSTEM.upper()
    with Client(daemon.socket) as client:
        client.pin("null", "mine", other)
        until(lambda: all(pin["is_kept"] for pin in client.pins("null")))
        assert cached(client, other) >= len(other)
        assert [pin["name"] for pin in client.unpin("null", "mine")] == ["config:house"]
        with pytest.raises(InvalidRequestError, match="nothing is pinned"):
            client.unpin("null", "mine")
        with pytest.raises(InvalidRequestError, match="by the configuration"):
            client.unpin("null", "config:house")
        for name in ("config:x", "", "a" * 101, "a\n"):
            with pytest.raises(InvalidRequestError):
                client.pin("null", name, other)


def test_the_command_line_pins_lists_and_drops(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "s.txt"
    file.write_text(SYSTEM.lower())
    above = ["prefix", "--socket", str(daemon.socket), "--model", "null"]
    run = CliRunner().invoke
    assert run(cli, [*above, "pin", "cli", str(file)]).exit_code == 0
    listed = run(cli, [*above, "list"])
    assert listed.exit_code == 0
    assert "config:house" in listed.output
    assert "cli" in listed.output
    dropped = run(cli, [*above, "drop", "cli", "--json"])
    assert dropped.exit_code == 0
    assert '"cli"' not in dropped.output
