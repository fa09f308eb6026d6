"""Question streams and hard pairs from the public sets that the semantic cache is measured on.

The data is found by --data DIR or $EDGE_RT_DATA; benchmarks/README.md says where it comes from.
"""

from __future__ import annotations

import csv
import lzma
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SHARE_REPEATED = 0.345  # of a stream's questions, that mean what an earlier one meant
FIT_SEED = 100  # of the stream that the cache's weights are fitted on; 0, 1 and 2 are measured
MISLABELLED = "Order does matter for asymmetric relations"  # 1 upstream, and means 0


def data_dir(given: Path | None) -> Path:
    """Give the directory of the data, or end with what is missing."""
    found = given or (Path(os.environ["EDGE_RT_DATA"]) if "EDGE_RT_DATA" in os.environ else None)
    if found is None:
        sys.exit("the public query pairs are not here: name their directory by --data DIR or EDGE_RT_DATA")
    for base in (found, found / "router_cache"):
        if (base / "qqp_pairs.csv.xz").is_file():
            return base
    sys.exit(f"{found} holds no qqp_pairs.csv.xz: name the directory that does by --data DIR or EDGE_RT_DATA")


def rows(directory: Path, name: str) -> list[dict[str, str]]:
    with lzma.open(directory / f"{name}.csv.xz", "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Questions:
    """QQP's questions, one per wording (case and punctuation aside), with the duplicates' clusters they belong to."""

    def __init__(self, pairs: Iterable[dict[str, str]]) -> None:
        parents: dict[str, str] = {}
        first: dict[str, str] = {}
        for pair in pairs:
            wordings = [_wording(pair[side]) for side in ("text_a", "text_b")]
            for wording, side in zip(wordings, ("text_a", "text_b"), strict=True):
                first.setdefault(wording, pair[side])
            one, other = (_root(parents, wording) for wording in wordings)
            if pair["label"] == "1":
                parents[one] = other
        self.cluster = {question: _root(parents, wording) for wording, question in first.items()}
        members: dict[str, list[str]] = defaultdict(list)
        for question, cluster in self.cluster.items():
            members[cluster].append(question)
        self._several = [group for group in members.values() if len(group) > 1]
        self._single = [group for group in members.values() if len(group) == 1]

    def stream(self, seed: int, n: int = 9500, without: frozenset[str] = frozenset()) -> list[str]:
        """Draw whole clusters at random, as many of several questions as make SHARE_REPEATED, and shuffle all.

        without names clusters that another stream has taken.
        """
        draw = random.Random(seed)
        several, single = (
            [g for g in kind if self.cluster[g[0]] not in without] for kind in (self._several, self._single)
        )
        draw.shuffle(several)
        draw.shuffle(single)
        taken: list[str] = []
        n_groups = 0
        while len(taken) < n and several and single:
            wants_repeats = len(taken) - n_groups < SHARE_REPEATED * len(taken)
            taken += several.pop() if wants_repeats else single.pop()
            n_groups += 1
        draw.shuffle(taken)
        return taken


def checklist(directory: Path) -> dict[tuple[str, str, bool], list[tuple[str, str]]]:
    """CheckList's pairs by capability, template and whether they mean the same."""
    templates: dict[tuple[str, str, bool], list[tuple[str, str]]] = defaultdict(list)
    for row in rows(directory, "checklist_qqp_mft"):
        if row["test"] != MISLABELLED:
            templates[row["capability"], row["test"], row["label"] == "1"].append((row["q1"], row["q2"]))
    return templates


def changed_numbers(directory: Path) -> list[tuple[str, str]]:
    """GSM-Plus: a sum, and the same with other numbers and another answer."""
    kinds = {"numerical substitution", "digit expansion", "integer-decimal-fraction conversion", "adding operation"}
    return [
        (row["seed_question"], row["question"])
        for row in rows(directory, "gsmplus_testmini")
        if row["same_answer"] == "0" and row["perturbation_type"] in kinds
    ]


def _wording(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _root(parents: dict[str, str], name: str) -> str:
    parents.setdefault(name, name)
    while parents[name] != name:
        parents[name] = parents[parents[name]]
        name = parents[name]
    return name
