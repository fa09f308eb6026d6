"""Whether lm-eval, asking a daemon, finds the log probabilities that the engine itself computes.

    python benchmarks/lm_eval.py [--backend native|llama_cpu]

The package lm-eval runs in an environment of its own below the cache, which the first run makes (0.8 GB). Its
local-completions scores the 80 endings of lm_eval_tasks/facts.jsonl, and local-chat-completions answers the 20
questions; both know the address and a key and nothing else, as tokens are the daemon's too. The same endings are scored
by a session of the same back end in this process, without daemon, batches or prefixes.

A file of its own with tokens' sums of log probabilities is the measure: on `native` they must be equal but for the
rounding of a sum, on `llama_cpu`, whose rows round differently in company, their difference is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu

_PACKAGE = "lm-eval[api]==0.4.13"
_TASKS = Path(__file__).parent / "lm_eval_tasks"
_KEY = "lm-eval"
_MODEL = "smollm2-135m-instruct"


def _program() -> Path:
    """Give lm-eval's command, installing it if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "lm-eval"
    program = cache / "bin" / "lm_eval"
    if not program.exists():
        venv.create(cache, with_pip=True)
        subprocess.run([cache / "bin" / "pip", "install", "--quiet", _PACKAGE], check=True)
    return program


def _evaluate(program: Path, folder: Path, kind: str, path: str, address: str, task: str, *options: str) -> Any:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": _KEY}
    arguments = f"model={_MODEL},base_url={address}{path},auth_token={_KEY},num_concurrent=4,max_length=4096"
    command = [str(program), "--model", kind, "--model_args", arguments, "--tasks", task, "--include_path", str(folder)]
    subprocess.run(
        [*command, "--output_path", str(folder / "out"), "--log_samples", *options],
        env=environ,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (results,) = folder.glob(f"out/**/results_*{''}.json")
    (samples,) = folder.glob(f"out/**/samples_{task}_*.jsonl")
    found = json.loads(results.read_text())["results"][task], [*map(json.loads, samples.read_text().splitlines())]
    results.unlink()
    samples.unlink()
    return found


def _session(backend: str) -> TokenSession:
    settings = config.load().config.catalog
    store = Store.open(settings)
    manifest = store.get(_MODEL)
    path = store.path(manifest, pick_variant(manifest, cpu.features(), backend=backend))
    if path is None:
        sys.exit(f"{_MODEL} is not in the store; `edge_rt models pull` fetches it")
    options = LoadOptions(n_ctx=512, n_seq_max=1, n_batch=512)
    return registry.get(backend).load(ModelFile(model=_MODEL, variant="", path=path, quant=""), options)


def _score(session: TokenSession, context: str, ending: str) -> float:
    """Give the log probability of an ending, whose tokens are those that the whole text has beyond the context's."""
    whole = session.tokenize(context + ending, special=True)
    start = len(session.tokenize(context, special=True))
    (rows,) = session.decode([SeqRows(0, 0, whole, want_logits=True, want_all=True)])
    session.seq_trim(0, 0)
    logits = rows.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(sum(logprobs[i - 1, whole[i]] for i in range(start, len(whole))))


def main(backend: str) -> None:
    program = _program()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in _TASKS.iterdir():
            if file.suffix in (".jsonl", ".yaml", ".py"):
                (folder / file.name).write_text(file.read_text().replace("FOLDER", str(folder)))
        (folder / "keys").write_text(f"{_KEY}\n")
        serve = [sys.executable, "-m", "edge_rt", "serve", "--socket", str(folder / "s"), "--tcp", "127.0.0.1:0"]
        with subprocess.Popen(
            [*serve, "--api-keys-file", str(folder / "keys")],
            env={**os.environ, "EDGE_RT__ENGINE__BACKEND": backend},
            stderr=subprocess.PIPE,
            text=True,
        ) as daemon:
            try:
                assert daemon.stderr is not None
                address = next(line for line in daemon.stderr if "edge_rt listens" in line).split()[-1]
                facts, samples = _evaluate(
                    program, folder, "local-completions", "/v1/completions", address, "edge_rt_facts"
                )
                chat, _ = _evaluate(
                    program,
                    folder,
                    "local-chat-completions",
                    "/v1/chat/completions",
                    address,
                    "edge_rt_chat",
                    "--apply_chat_template",
                )
            finally:
                daemon.terminate()
                daemon.stderr.close()  # type: ignore[union-attr]
    session = _session(backend)
    apart = [
        abs(float(answer[0][0]) - _score(session, *asked.values()))
        for sample in samples
        for answer, asked in zip(sample["resps"], sample["arguments"].values(), strict=True)
    ]
    session.close()
    print(f"{backend}: acc {facts['acc,none']:.2f}, acc_norm {facts['acc_norm,none']:.2f} of {len(samples)}")
    print(f"log probabilities of {len(apart)} endings apart by {np.mean(apart):.6f} nats, at most {max(apart):.6f}")
    print(f"chat: {chat['holds,none']:.2f} of 20 hold the word")
    if backend == "native" and max(apart) > 1e-4:
        sys.exit("they must be equal")


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--backend") + 1] if "--backend" in sys.argv else "native")
