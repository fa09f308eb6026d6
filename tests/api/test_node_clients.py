"""What programs in Node ask with, on a real daemon over TCP: openai, Anthropic's, ollama, the AI SDK, LangChain's.

node/clients.mjs asks; the null model answers with what it was asked.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import node_packages
from tests.api.daemon import Daemon

HERE = Path(__file__).parent / "node"
KEY = "the-key"
TEXT = "grüße, 😀 and a line\nbreak"
N_BYTES = len(TEXT.encode())
WIDE = """
[models.null-wide]
backend = "null"
n_ctx = 131072
"""
ONE_TOKEN = json.dumps({"env": {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1"}})


@pytest.fixture(scope="module")
def packages() -> Path:
    return node_packages.folder_of(HERE / "package.json")


@pytest.fixture(scope="module")
def daemon(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    del packages  # without them nobody asks
    place = tmp_path_factory.mktemp("d")
    keys = place / "keys"
    keys.write_text(f"{KEY}\n")
    with Daemon(place, extra=WIDE, args=("--tcp", "127.0.0.1:0", "--api-keys-file", str(keys))) as running:
        yield running


@pytest.fixture(scope="module")
def address(daemon: Daemon) -> str:
    return next(line for line in daemon.lines if "listens" in line).rpartition(" ")[2]


@pytest.fixture(scope="module")
def answers(packages: Path, address: str) -> dict[str, Any]:
    """Let every client ask; give what each got, by its name."""
    command = ["node", str(HERE / "clients.mjs"), str(packages), address, KEY, "null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {answer.pop("client"): answer for answer in found}


def test_openai(answers: dict[str, Any]) -> None:
    got = answers["openai"]
    assert "failed" not in got, got
    texts = ("chat", "streamed", "response", "response_streamed")
    assert [got[name] for name in texts] == [TEXT] * len(texts)
    assert got["usage"]["completion_tokens"] == N_BYTES + 1
    assert [usage["prompt_tokens"] for usage in got["streamed_usage"]] == [got["usage"]["prompt_tokens"]]
    assert got["tool_arguments"] == [{"word": "Graz"}]
    assert "a town" in got["after"]
    assert set(got["formed"]) == {"word"}
    assert len(got["completion"]) > 10
    assert "null" in got["models"]
    assert (got["no_model"]["status"], got["no_model"]["code"]) == (404, "model_not_found")
    assert (got["bad_field"]["status"], got["bad_field"]["type"]) == (400, "invalid_request_error")
    assert "temperature" in got["bad_field"]["message"]
    assert (got["no_key"]["status"], got["no_key"]["requestID"] is None) == (401, False)


def test_anthropic(answers: dict[str, Any]) -> None:
    got = answers["anthropic"]
    assert "failed" not in got, got
    block = {"type": "text", "text": TEXT, "citations": None}
    assert (got["message"], got["streamed"]) == ([block], [block])
    n_prompt = got["counted"]["input_tokens"]
    for usage in (got["usage"], *got["started_usage"], got["streamed_usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert [usage["output_tokens"] for usage in got["started_usage"]] == [0]
    assert got["streamed_usage"]["output_tokens"] == N_BYTES + 1
    assert got["called"][-1] == {"type": "tool_use", "name": "look_up", "input": {"word": "Graz"}}
    assert got["continued"] == [{**block, "text": TEXT.removeprefix("grüße")}]
    assert "null" in got["models"]
    for name, status, kind in (
        ("no_model", 404, "not_found_error"),
        ("bad_field", 400, "invalid_request_error"),
        ("too_long", 400, "invalid_request_error"),
        ("no_key", 401, "authentication_error"),
    ):
        assert (got[name]["status"], got[name]["type"]) == (status, kind)
        assert got[name]["requestID"]
    assert "prompt is too long: " in got["too_long"]["message"]


def test_ollama(answers: dict[str, Any]) -> None:
    got = answers["ollama"]
    assert "failed" not in got, got
    assert (got["chat"], got["streamed"], got["generated"]) == (TEXT, TEXT, TEXT)
    assert (got["done"], got["counts"][1]) == ("stop", N_BYTES + 1)
    (call,) = got["called"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("look_up", {"word": "Graz"})
    assert set(got["formed"]) == {"word"}
    assert got["continued"] == TEXT.removeprefix("grüße")
    assert "null:latest" in got["models"]
    assert "null:latest" in got["running"]
    assert {"completion", "tools"} <= set(got["shown"])
    assert (got["no_model"]["status"], got["no_key"]["status"]) == (404, 401)


def test_the_ai_sdk(answers: dict[str, Any]) -> None:
    got = answers["ai-sdk"]
    assert "failed" not in got, got
    assert (got["text"], got["streamed"], got["reason"]) == (TEXT, TEXT, "stop")
    assert got["usage"]["outputTokens"] == got["streamed_usage"]["outputTokens"] == N_BYTES + 1
    assert got["tool_arguments"] == [{"word": "Graz"}]
    assert "a town" in got["after"]
    assert set(got["formed"]) == {"word"}
    assert (got["no_model"]["status"], got["bad_field"]["status"]) == (404, 400)
    assert "temperature" in got["bad_field"]["message"]


def test_langchain_ollama(answers: dict[str, Any]) -> None:
    got = answers["langchain-ollama"]
    assert "failed" not in got, got
    assert (got["text"], got["streamed"]) == (TEXT, TEXT)
    assert got["usage"]["output_tokens"] == N_BYTES + 1
    assert got["calls"] == [{"name": "look_up", "args": {"word": "Graz"}}]
    assert set(got["formed"]) == {"word"}


def claude_code(packages: Path, address: str, home: Path, model: str, *options: str) -> tuple[int, str]:
    """Ask once as a user without any settings does; give the exit status and what is printed."""
    environ = {
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(home),
        "PATH": os.environ["PATH"],
    }
    program = packages / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    done = subprocess.run(
        ["node", str(program), "-p", "Name a planet.", *options],
        cwd=home,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_claude_code_is_answered(packages: Path, address: str, tmp_path: Path) -> None:
    alone = ("--system-prompt", "Be kind.", "--tools", "")
    status, said = claude_code(packages, address, tmp_path, "null-wide", *alone)
    assert status == 0, said
    assert "Name a planet." in said


def test_claude_codes_own_prompt_is_taken_whole_or_refused_in_words(
    daemon: Daemon, packages: Path, address: str, tmp_path: Path
) -> None:
    status, said = claude_code(packages, address, tmp_path, "null")
    assert status != 0
    assert "too long" in said
    assert "limit 4096" in said
    # Its instructions and all its tools, of which an answer of one token shows that they were taken.
    status, said = claude_code(packages, address, tmp_path, "null-wide", "--settings", ONE_TOKEN)
    assert daemon.metric('edge_rt_prompt_tokens_total{model="null-wide"') > 50_000, said


def test_nothing_unexpected_was_logged(daemon: Daemon, answers: dict[str, Any]) -> None:
    del answers
    assert "failed unexpectedly" not in daemon.log
    assert "Traceback" not in daemon.log
