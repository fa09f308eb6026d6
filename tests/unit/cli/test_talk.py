from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt.cli import main
from edge_rt.cli.talk import Account, daemon_path
from edge_rt.config import Server
from edge_rt.types import Usage


def test_a_user_without_a_runtime_directory_has_no_daemon_to_ask() -> None:
    assert daemon_path(Server(), {}, uid=1000, of_service=Path("/nowhere")) is None


def test_a_daemon_is_looked_for_where_it_would_listen() -> None:
    assert daemon_path(Server(socket_path="/a.sock"), {}, uid=1000) == Path("/a.sock")
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert daemon_path(Server(), environ, uid=1000, of_service=Path("/nowhere")) == Path(
        "/run/user/1000/edge_rt/edge_rt.sock"
    )


def test_the_service_is_asked_where_the_user_has_no_daemon_of_their_own(tmp_path: Path) -> None:
    service, own = tmp_path / "service", tmp_path / "edge_rt" / "edge_rt.sock"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    service.write_text("")
    assert daemon_path(Server(), environ, uid=1000, of_service=service) == service
    assert daemon_path(Server(), {}, uid=1000, of_service=service) == service
    assert daemon_path(Server(socket_path="/a.sock"), environ, uid=1000, of_service=service) == Path("/a.sock")
    own.parent.mkdir()
    own.write_text("")
    assert daemon_path(Server(), environ, uid=1000, of_service=service) == own


def test_an_answer_of_one_token_has_no_decode_rate() -> None:
    account = Account(
        finish_reason="length",
        usage=Usage(prompt_tokens=10, completion_tokens=1),
        prefill_s=0.5,
        prefill_tokens=10,
        decode_s=0.001,
        decode_tokens=0,
    )
    assert account.line() == "10 prompt tokens · prefill 0.50 s (20.0 t/s) · 1 tokens · decode 0.00 s"
    assert (account.record()["prefill_tps"], account.record()["decode_tps"]) == (20.0, None)


# httpcore2 leaves a socket that could not connect to the collector, which warns.
leaks = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@leaks
@pytest.mark.parametrize(
    ("model", "options", "status", "words"),
    [
        ("m", ["--socket", "s", "--local"], 2, "--local asks none"),
        ("m:q4_1", ["--socket", "s"], 1, "a variant with --socket is not supported"),
        ("./m", ["--socket", "s"], 1, "a file with --socket is not supported"),
        ("m", ["--socket", "s"], 1, "no daemon answers on s: No such file or directory"),
    ],
)
def test_a_daemon_is_not_asked_for_what_it_cannot_give(
    model: str, options: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["run", model, "hi", *options])
    assert done.exit_code == status
    assert words in done.stderr
    del done
    gc.collect()


@leaks
@pytest.mark.parametrize(("model", "note"), [("nope", True), ("nope:q4_1", False)])
def test_a_dead_daemon_is_mentioned_before_a_model_is_loaded_here(model: str, note: bool, socket_dir: Path) -> None:
    path = socket_dir / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    done = CliRunner(env={"EDGE_RT__SERVER__SOCKET_PATH": str(path)}).invoke(main, ["run", model, "hi"])
    assert (f"{path}: Connection refused; loading the model into this process" in done.stderr) == note
    assert "not in the catalog" in done.stderr
    del done
    gc.collect()
