"""`make demo` works, and says what is wrong when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(model_store: Path, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    store = {"EDGE_RT__CATALOG__STORE_DIR": str(model_store.parents[2])}
    return subprocess.run(
        [sys.executable, "-m", "tools.demo"],
        cwd=ROOT,
        env={**os.environ, **store, "XDG_RUNTIME_DIR": str(tmp_path), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.model
def test_the_demo_shows_answers_of_the_model(model_store: Path, tmp_path: Path) -> None:
    done = run(model_store, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in (
        "llama_cpu: device cpu",
        "native: device cpu",
        '"object":"chat.completion.chunk"',
        "answer tokens, prefill",
        '{"status":"ok"}',
        'edge_rt_completion_tokens_total{model="smollm2-135m-instruct"}',
        "The daemon has stopped cleanly.",
    ):
        assert shown in done.stdout
    answer = done.stdout.split("chat.completion.chunk")[1].split("answer tokens")[0]
    assert "force" in answer
    assert "Photosynthesis is" in done.stdout.split("what photosynthesis is.")[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_a_daemon_that_does_not_start_ends_the_demo_with_its_log(model_store: Path, tmp_path: Path) -> None:
    done = run(model_store, tmp_path, EDGE_RT__SERVER__SOCKET_GROUP="no-such-group")
    assert done.returncode == 1
    assert "before it was ready" in done.stderr
    assert "no-such-group" in done.stderr
    assert "Traceback" not in done.stderr
