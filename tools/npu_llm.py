"""Prefill with a language model's layers on an NPU, and say how far that is from floats on the CPU.

    python -m tools.npu_llm qnn MODEL.gguf TEXT… --layers 0:2 --precision fp16
    python -m tools.npu_llm qnn MODEL.gguf TEXT… --precision w8a16 --json        all layers, two at a time

A first step: chunks of 128 tokens through graphs of a few layers each (convert/llama_chunk.py). A text's first token is
computed on the CPU: its states are a hundred times larger than all others', and would take their scale. Pieces of 257
tokens are cut from the texts; the last two are compared on, the others calibrate. docs/npu.md says what is missing for
generating text.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.fpga_llama import read_exact, read_llama
from edge_rt.backends.llama_math import KvCache, LlamaMath
from edge_rt.backends.native_config import NativeConfig
from edge_rt.convert.gptq import round_matrices
from edge_rt.convert.llama_chunk import Shape, angles, build_chunk, mask
from edge_rt.convert.npu import W4A16, W8A16, quantize
from tools.activations import Statistics
from tools.npu_accuracy import elsewhere, patient
from tools.npu_ranges import ReportedErrors

Floats = NDArray[np.float32]
PrecisionName = Literal["fp16", "w8a16", "w4a16"]
SHAPE = Shape(chunk=128, n_past=256)
_N_TOKENS = 1 + 2 * SHAPE.chunk  # of each text: the first, one chunk as the past, one that is compared
_N_JUDGED = 2  # pieces


@dataclass(frozen=True, slots=True)
class Sample:
    """A text in floats: states [layers + 1] of each token, and what attention keeps."""

    ids: tuple[int, ...]
    states: tuple[Floats, ...]
    kv: KvCache

    def feeds(self, config: NativeConfig, layers: Sequence[int], first: int, x: Floats) -> dict[str, Floats]:
        """Give what a graph of these layers takes for the chunk that begins at token first, whose states are x."""
        found = {"x": x[None], "mask": mask(first, SHAPE), **angles(config, first, SHAPE)}
        for index in layers:
            for part, kept in (("keys", self.kv.keys[index]), ("values", self.kv.values[index])):
                past = np.zeros((1, kept.shape[1], SHAPE.n_past, kept.shape[2]), np.float32)
                filled = kept[:first].transpose(1, 0, 2)
                if part == "keys" and not config.rope.pairs_halves:
                    filled = np.concatenate([filled[..., ::2], filled[..., 1::2]], axis=-1)
                past[0, :, SHAPE.n_past - first :] = filled
                found[f"{part}.{index}"] = past
        return found


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Some layers: their nodes, and how far the tokens' states behind them are off, with all that came before."""

    layers: tuple[int, ...]
    n_nodes: int
    n_nodes_elsewhere: int
    compile_s: float
    run_s: float
    error_median: float
    error_most: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """agreement and perplexities are there where all layers ran."""

    precision: str
    backend: str
    evidence: str
    n_tokens: int
    groups: tuple[GroupReport, ...]
    agreement: float | None = None  # same token first as in floats
    perplexity: float | None = None
    perplexity_float: float | None = None
    divergence: float | None = None  # KL of floats from it, nats a token


@click.command(cls=ReportedErrors, help=(__doc__ or "").partition("\n")[0])
@click.argument("vendor")
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--layers", "span", default=":", show_default=True, metavar="FIRST:END")
@click.option("--group", type=click.IntRange(1), default=2, show_default=True, help="Layers in a graph.")
@click.option("--precision", type=click.Choice(["fp16", "w8a16", "w4a16"]), default="fp16", show_default=True)
@click.option(
    "--pieces", "n_pieces", type=click.IntRange(_N_JUDGED + 1), default=6, show_default=True, help="Of TEXTS."
)
@click.option("--json", "as_json", is_flag=True)
def main(
    vendor: str,
    gguf: Path,
    texts: tuple[Path, ...],
    span: str,
    group: int,
    precision: PrecisionName,
    n_pieces: int,
    as_json: bool,
) -> None:
    """Print what layers of GGUF, a model of the llama family, give for TEXTS on VENDOR's NPU."""
    file = ModelFile(model=gguf.stem, variant="", path=gguf, quant="")
    llama, matrices = read_llama(file), read_exact(file)
    floats = llama.with_linear(lambda name, x: x @ matrices[name].T)
    pieces = list(_tokens(gguf, texts))
    if len(pieces) < n_pieces:
        raise ValueError(f"the texts have {len(pieces)} pieces of {_N_TOKENS} tokens, not {n_pieces}")
    # Spread over all texts.
    chosen = [pieces[at * len(pieces) // n_pieces] for at in range(n_pieces)]
    samples = [_sample(floats, llama.config, ids) for ids in chosen]
    first, _, end = span.partition(":")
    layers = range(len(llama.config.layers))[slice(int(first or 0), int(end) if end else None)]
    run = _Run(f"npu_{vendor}", llama.config, matrices, llama.vectors, samples, precision)
    found = [run.group(layers[at : at + group]) for at in range(0, len(layers), group)]
    report = run.report(found, floats if len(layers) == len(llama.config.layers) else None)
    click.echo(msgspec.json.encode(report).decode() if as_json else _table(report))


def _tokens(gguf: Path, texts: Sequence[Path]) -> Iterator[tuple[int, ...]]:
    import llama_cpp

    vocabulary = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
    for text in texts:
        ids = vocabulary.tokenize(text.read_bytes(), add_bos=False)
        yield from (tuple(ids[at : at + _N_TOKENS]) for at in range(0, len(ids) - _N_TOKENS + 1, _N_TOKENS))


def _sample(floats: LlamaMath, config: NativeConfig, ids: tuple[int, ...]) -> Sample:
    kv = KvCache.of(config, _N_TOKENS)
    return Sample(ids, tuple(floats.states(ids, kv)), kv)


class _Run:
    """Takes the judged texts' last chunks through one group of layers after the other, on the NPU's own states."""

    def __init__(
        self,
        backend: str,
        config: NativeConfig,
        matrices: Mapping[str, Floats],
        vectors: Mapping[str, Floats],
        samples: Sequence[Sample],
        precision: PrecisionName,
    ) -> None:
        self._backend, self._config, self._matrices, self._vectors = backend, config, matrices, vectors
        self._calibrate, self._judge = samples[:-_N_JUDGED], samples[-_N_JUDGED:]
        self._precision = precision
        self._first = 1 + SHAPE.chunk
        self._x: list[Floats] | None = None
        self._evidence = ""

    def group(self, layers: Sequence[int]) -> GroupReport:
        model = build_chunk(self._config, self._matrices, self._vectors, layers, SHAPE)
        if self._precision != "fp16":
            model = self._quantized(model, layers)
        x = self._x or [sample.states[layers[0]][self._first :] for sample in self._judge]
        feeds = [s.feeds(self._config, layers, self._first, part) for s, part in zip(self._judge, x, strict=True)]
        found = patient(self._backend)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "chunk.onnx"
            path.write_bytes(model.SerializeToString(deterministic=True))
            file = ModelFile(model="chunk", variant=self._precision, path=path, quant=self._precision.upper())
            begun_s = time.monotonic()
            session = found.load_tensor(file, TensorOptions(npu=NpuOptions(require="npu")))
            compile_s = time.monotonic() - begun_s
            try:
                begun_s = time.monotonic()
                self._x = [session.run(feed, ["hidden"])["hidden"][0] for feed in feeds]
                run_s = (time.monotonic() - begun_s) / len(feeds)
                info = session.info
            finally:
                session.close()
        self._evidence = info.evidence
        errors = np.concatenate(
            [
                _errors(part, sample.states[layers[-1] + 1][self._first :])
                for part, sample in zip(self._x, self._judge, strict=True)
            ]
        )
        report = GroupReport(
            layers=tuple(layers),
            n_nodes=sum(part.n_nodes for part in info.placement),
            n_nodes_elsewhere=elsewhere(info.placement),
            compile_s=compile_s,
            run_s=run_s,
            error_median=float(np.median(errors)),
            error_most=float(errors.max()),
        )
        click.echo(f"layers {layers[0]} to {layers[-1]}: {report.error_median:.4f} in {run_s:.1f} s", err=True)
        return report

    def _quantized(self, model: onnx.ModelProto, layers: Sequence[int]) -> onnx.ModelProto:
        feeds = [
            sample.feeds(self._config, layers, first, sample.states[layers[0]][first : first + SHAPE.chunk])
            for sample in self._calibrate
            for first in (1, self._first)
        ]
        ranges = Statistics.collect(model, feeds).ranges("minmax")
        if self._precision == "w8a16":
            return quantize(model, ranges, W8A16)
        rounded, scales = round_matrices(model, ((feed, SHAPE.chunk) for feed in feeds))
        return quantize(rounded, ranges, W4A16, scales=scales)

    def report(self, groups: Sequence[GroupReport], floats: LlamaMath | None) -> Report:
        told: dict[str, float] = {}
        if floats is not None and self._x is not None:
            told = _judged(floats, self._x, self._judge, self._first)
        return Report(
            precision=self._precision,
            backend=self._backend,
            evidence=self._evidence,
            n_tokens=len(self._judge) * SHAPE.chunk,
            groups=tuple(groups),
            **told,
        )


def _errors(found: Floats, expected: Floats) -> NDArray[np.float64]:
    difference = np.linalg.norm((found - expected).astype(np.float64), axis=1)
    return np.asarray(difference / np.linalg.norm(expected.astype(np.float64), axis=1))


def _judged(floats: LlamaMath, x: Sequence[Floats], samples: Sequence[Sample], first: int) -> dict[str, float]:
    """Compare logits: which token stands first, and how likely the one that comes is."""
    same, nats, nats_float, divergence = [], [], [], []
    for part, sample in zip(x, samples, strict=True):
        found, expected = (_log_softmax(floats.logits(states)) for states in (part, sample.states[-1][first:]))
        following = np.array(sample.ids[first + 1 :])
        rows = np.arange(len(following))
        same.append((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
        nats.append(-found[rows, following].mean())
        nats_float.append(-expected[rows, following].mean())
        divergence.append((np.exp(expected) * (expected - found)).sum(axis=1).mean())
    return {
        "agreement": float(np.mean(same)),
        "perplexity": float(np.exp(np.mean(nats))),
        "perplexity_float": float(np.exp(np.mean(nats_float))),
        "divergence": float(np.mean(divergence)),
    }


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _table(report: Report) -> str:
    lines = [f"{report.precision} on {report.backend} ({report.evidence}), {report.n_tokens} tokens"]
    for group in report.groups:
        n_there = group.n_nodes - group.n_nodes_elsewhere
        lines.append(
            f"layers {group.layers[0]} to {group.layers[-1]}: {n_there} of {group.n_nodes} nodes, "
            f"error {group.error_median:.4f} (median), {group.error_most:.4f} (most)"
        )
    if report.agreement is not None:
        lines.append(
            f"same token first {report.agreement:.4f}, perplexity {report.perplexity:.3f} "
            f"(floats {report.perplexity_float:.3f}), divergence {report.divergence:.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(prog_name="python -m tools.npu_llm")
