from __future__ import annotations

from pathlib import Path

from edge_rt.cli.talk import Account, daemon_path
from edge_rt.config import Server
from edge_rt.types import Usage


def test_a_user_without_a_runtime_directory_has_no_daemon_to_ask() -> None:
    assert daemon_path(Server(), {}, uid=1000) is None


def test_a_daemon_is_looked_for_where_it_would_listen() -> None:
    assert daemon_path(Server(socket_path="/a.sock"), {}, uid=1000) == Path("/a.sock")
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert daemon_path(Server(), environ, uid=1000) == Path("/run/user/1000/edge_rt/edge_rt.sock")


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
