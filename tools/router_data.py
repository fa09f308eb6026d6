"""Labelled requests to train and test the router on, read from a folder of xz-compressed CSV files.

The folder's README names the sources: RouteLLM, ZeroEval, MMLU-Pro (Apache-2.0) and LLMRouter (MIT).
"""

from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path

from edge_rt.router.fitting import Example

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """A file, how its text is read, and the pair of models whose answers were scored."""

    file: str
    weak: str
    strong: str
    text: Callable[[Row], str]
    topic: Callable[[Row], str]
    licence: str


def _exam(row: Row) -> str:
    options = json.loads(row["options"])
    return "\n".join([row["question"], *(f"{chr(65 + i)}. {option}" for i, option in enumerate(options)), "Answer:"])


SOURCES = {
    "mmlu": Source(
        "routellm_mmlu",
        "weak_mixtral8x7b",
        "strong_gpt4_1106",
        lambda r: r["prompt"],
        lambda r: f"exam: {r['domain'].replace('_', ' ')}",
        "Apache-2.0",
    ),
    "gsm8k": Source(
        "routellm_gsm8k",
        "weak_mixtral8x7b",
        "strong_gpt4_1106",
        lambda r: r["prompt"],
        lambda _: "sums in words",
        "Apache-2.0",
    ),
    "mix": Source(
        "llmrouter_mix",
        "s_qwen2.5-7b-instruct",
        "s_llama-3.1-nemotron-51b-instruct",
        lambda r: r["question"],
        lambda r: f"task: {r['task']}",
        "MIT",
    ),
    "mmlu_pro": Source(
        "mmlu_pro",
        "Phi-3-mini-4k-instruct",
        "gemini-1.5-pro-002",
        _exam,
        lambda r: f"hard exam: {r['category']}",
        "Apache-2.0",
    ),
    "crux": Source(
        "zeroeval_crux",
        "Qwen2.5-3B-Instruct",
        "gpt-4o-2024-08-06",
        lambda r: r["question"],
        lambda _: "what code computes",
        "Apache-2.0",
    ),
    "math-l5": Source(
        "zeroeval_math-l5",
        "Qwen2.5-3B-Instruct",
        "gpt-4o-2024-08-06",
        lambda r: r["question"],
        lambda _: "hard mathematics",
        "Apache-2.0",
    ),
    "gsm-phi": Source(
        "zeroeval_gsm",
        "Phi-3.5-mini-instruct",
        "gpt-4o-2024-08-06",
        lambda r: r["question"],
        lambda _: "sums in words",
        "Apache-2.0",
    ),
}


def read_rows(folder: Path, file: str) -> list[Row]:
    """Read one file. Raises FileNotFoundError naming it."""
    path = folder / f"{file}.csv.xz"
    csv.field_size_limit(2**24)
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def read_examples(folder: Path, name: str) -> list[Example]:
    """Read a source's rows that both models answered, without the contaminated ones."""
    source = SOURCES[name]
    return [
        Example(
            text=source.text(row),
            local=_number(row[source.weak]),
            cloud=_number(row[source.strong]),
            topic=source.topic(row),
        )
        for row in read_rows(folder, source.file)
        if row.get("contaminated", "0") == "0" and row[source.weak] and row[source.strong]
    ]


def _number(text: str) -> float:
    return float(text) if text else nan
