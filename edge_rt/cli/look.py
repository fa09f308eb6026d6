"""`edge_rt run` for models that take files: labels, boxes or text of a picture, speech in a recording, embeddings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.api import media_wire
from edge_rt.api.client import Client
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.store import Store
from edge_rt.chains import task_of
from edge_rt.cli.progress import pull_progress
from edge_rt.cli.talk import running_daemon
from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import MediaAnswer, MediaRequest

_PICTURE: Final = "a picture (JPEG or PNG)"
TAKES: Final = {
    "classify": _PICTURE,
    "detect": _PICTURE,
    "detect-text": _PICTURE,
    "read-text": f"{_PICTURE} of one line of text",
    "ocr": _PICTURE,
    "vad": "a recording (WAV)",
    "embed": "a text",
}
_DRAWN: Final = frozenset({"detect", "detect-text", "ocr"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked on the command line.

    file     a path, - for stdin, None if it was not given; for embed it is the text
    output   where the picture with its boxes goes
    """

    model: str
    task: str
    file: str | None
    reference: Path | None
    output: Path | None
    top_k: int | None
    min_score: float | None
    as_json: bool
    verbose: bool


class Eyes(Protocol):
    """Where a file is looked at. place is for people."""

    place: str

    def look(self, request: MediaRequest) -> MediaAnswer: ...


class DaemonEyes:
    """Asks the daemon."""

    def __init__(self, client: Client, task: str) -> None:
        self.place = f"the daemon on {client.address}"
        self._client = client
        self._task = task

    def look(self, request: MediaRequest) -> MediaAnswer:
        return self._client.look(self._task, request)


class LocalEyes:
    """Asks a model or a chain in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model
        evidence = getattr(getattr(model, "info", None), "evidence", "device")  # a chain has no single model's
        self.place = "this process" if evidence == "device" else f"this process, {model.info.backend} ({evidence})"

    def look(self, request: MediaRequest) -> MediaAnswer:
        options: dict[str, Any] = {"regions": request.regions, "top_k": request.top_k, "min_score": request.min_score}
        answer: MediaAnswer = self._model.look(request.data, reference=request.reference, **options)
        return answer


def media_task(loaded: config.Loaded, model: str) -> str:
    """Tell what a model of the catalog does with a file, "" if it is none that takes one."""
    if model.endswith(".onnx"):
        remedy = "a manifest with a [pipeline] tells (docs/media.md); from Python, edge_rt.load takes arrays too"
        raise click.UsageError(f"{model} does not tell how a picture or a text becomes its tensors: {remedy}.")
    model_id = model.partition(":")[0]
    manifests, chains = _catalog(loaded)
    task = task_of(model_id, manifests, chains)
    if not task and (manifest := manifests.get(model_id)) is not None and manifest.kind == "tensor":
        raise click.UsageError(f"{model} takes tensors and no files: its manifest has no [pipeline].")
    return task


def _catalog(loaded: config.Loaded) -> tuple[dict[str, Manifest | None], dict[str, Chain]]:
    store = Store.open(loaded.config.catalog)
    return {m.id: m for m in store.manifests()}, {chain.id: chain for chain in store.chains()}


def run(job: Job, loaded: config.Loaded, *, socket: Path | None, local: bool, force: bool) -> None:
    """Look at a file and print what was found."""
    output = _output(job)
    request = MediaRequest(
        id="run",
        model=job.model,
        data=_data(job),
        reference=_read_file(job.reference, job) if job.reference is not None else b"",
        top_k=job.top_k,
        min_score=job.min_score,
    )
    with open_eyes(loaded, job, socket=socket, local=local, force=force) as eyes:
        try:
            answer = eyes.look(request)
        except InvalidRequestError as exc:
            raise _in_words_of_the_command(exc, job) from exc
    if job.as_json:
        click.echo(json.dumps(_record(job, eyes, answer)))
    else:
        _print(job, answer)
    if output is not None:
        from edge_rt.cli.drawing import draw  # Pillow

        draw(request.data, answer.boxes, output, max_pixels=loaded.config.limits.max_pixels)
        click.echo(f"wrote {output}", err=True)
    if job.verbose:
        click.echo(_account(eyes, answer), err=True)


def _in_words_of_the_command(error: InvalidRequestError, job: Job) -> InvalidRequestError:
    """Name the file or the option instead of the request's field."""
    data = "the text" if job.task == "embed" else "the file on stdin" if job.file in (None, "-") else job.file
    names = {"data": data, "file": data, "reference": "--reference"}
    return replace(error, param=names.get(error.param, error.param))


@contextmanager
def open_eyes(loaded: config.Loaded, job: Job, *, socket: Path | None, local: bool, force: bool) -> Iterator[Eyes]:
    """Ask a running daemon, or models in this process, by the rules of talk.open_talk."""
    with ExitStack() as stack:
        client = stack.enter_context(running_daemon(loaded, job.model, socket=socket, local=local))
        if client is not None:
            yield DaemonEyes(client, job.task)
            return
        from edge_rt.library import load  # numpy and onnxruntime, which a call to the daemon does not need

        with pull_progress() as progress:
            model = load(job.model, settings=loaded, pull=True, progress=progress, force=force)
        yield LocalEyes(stack.enter_context(model))


def _data(job: Job) -> bytes:
    """Read what is looked at."""
    if job.file is None and sys.stdin.isatty():
        raise click.UsageError(
            f"{job.model} takes {TAKES[job.task]}: give {'it' if job.task == 'embed' else 'a FILE'}."
        )
    if job.file is None or job.file == "-":
        data = sys.stdin.buffer.read()
    elif job.task == "embed":
        data = job.file.encode()
    else:
        data = _read_file(Path(job.file), job)
    if not data.strip():
        raise click.UsageError(f"There is nothing to look at: {job.model} takes {TAKES[job.task]}.")
    return data


def _read_file(path: Path, job: Job) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise click.UsageError(f"{path}: {exc.strerror}. {job.model} takes {TAKES[job.task]}.") from exc


def _output(job: Job) -> Path | None:
    """Say where the drawn picture goes: beside the reader, who may not own the picture's directory."""
    if job.reference is not None and job.task not in {"detect", "classify"}:
        raise click.UsageError(f"--reference is for models that compare two pictures; {job.model} does not.")
    if job.output is not None and job.task not in _DRAWN:
        raise click.UsageError(f"--output is for boxes in pictures, which {job.model} does not find.")
    output = job.output
    if output is None:
        if job.task != "detect" or job.as_json or job.file is None or job.file == "-":
            return None
        output = Path(f"{Path(job.file).stem}.found.png")
    if output.suffix.lower() not in {".png", ".jpg", ".jpeg"}:
        raise click.UsageError(f"--output {output}: name a .png or .jpg file.")
    if not os.access(output.parent, os.W_OK):
        problem = "cannot be written to" if output.parent.is_dir() else "does not exist"
        raise click.UsageError(f"--output {output}: the folder {output.parent} {problem}.")
    for source in (job.file, job.reference):
        if source is not None and output.exists() and Path(source).exists() and output.samefile(source):
            raise click.UsageError(f"{output} is a file that is looked at; name another with --output.")
    return output


def _print(job: Job, answer: MediaAnswer) -> None:
    if job.task == "embed":
        click.echo(json.dumps(list(answer.embedding)))
    elif job.task == "read-text":
        for text in answer.texts:
            click.echo(text.label)
        if not any(text.label for text in answer.texts):
            click.echo("no text that can be read", err=True)
    elif rows := _rows(job.task, answer):
        click.echo(
            tabulate(
                rows[1:], rows[0], "plain", disable_numparse=True, colalign=("right",) * (len(rows[0]) - 1) + ("left",)
            )
        )
    else:
        click.echo("no speech" if job.task == "vad" else "nothing found", err=True)


def _rows(task: str, answer: MediaAnswer) -> list[tuple[str, ...]]:
    """Make a table whose first row is its head; [] if nothing was found."""
    if task == "vad":
        spans = [(f"{s.start_s:.2f}", f"{s.end_s:.2f}", f"{s.end_s - s.start_s:.2f} s") for s in answer.spans]
        return [("FROM", "TO", "SPEECH"), *spans] if spans else []
    if task == "classify":
        labels = [(f"{label.score:.3f}", label.label) for label in answer.labels]
        return [("SCORE", "LABEL"), *labels] if labels else []
    rows = [
        (str(i), f"{b.score:.3f}", *(f"{v:.0f}" for v in (b.x, b.y, b.width, b.height)), b.text or b.label)
        for i, b in enumerate(answer.boxes, 1)
    ]
    return [("#", "SCORE", "X", "Y", "WIDTH", "HEIGHT", "TEXT" if task == "ocr" else "LABEL"), *rows] if rows else []


def _record(job: Job, eyes: Eyes, answer: MediaAnswer) -> dict[str, Any]:
    """Give the answer as the API has it, and where it came from."""
    writers: dict[str, Callable[[str, MediaAnswer], Any]] = {
        "classify": media_wire.classification,
        "detect": media_wire.detection,
        "vad": media_wire.speech,
    }
    if job.task == "embed":
        found: dict[str, Any] = {
            "object": "embedding",
            "model": job.model,
            "embedding": list(answer.embedding),
            "n_tokens": answer.n_tokens,
        }
    else:
        found = msgspec.to_builtins(writers.get(job.task, media_wire.reading)(job.model, answer))
    return {**found, "asked": eyes.place}


def _account(eyes: Eyes, answer: MediaAnswer) -> str:
    """Say in one line where it was computed and what it took."""
    parts = [f"by {answer.stage}"] if answer.stage else []
    if answer.timings is not None:
        parts.append(f"computed in {answer.timings.compute_s * 1e3:.1f} ms")
        parts.append(f"waited {answer.timings.queue_s * 1e3:.1f} ms")
    if (energy := answer.energy) is not None:
        parts.append(f"{energy.total_j:.3g} J of the {energy.boundary}, {energy.quality}")
    where = " on ".join(filter(None, (answer.variant, answer.place)))
    return " · ".join([*parts, f"on {eyes.place}" + (f": {where}" if where else "")])
