"""The table of layers that Rockchip's compiler prints; for its driver, under its own environment's Python."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

NOT_TAKEN = "RKNN computes them on the board's CPU"
_ROW = re.compile(r"RKNN: \[[\d:.]+\] +(\d+) +(\S+) +(\S+) +(NPU|CPU|GPU) +\S+ +\S+ +(\d+)/(\d+)/(\d+) +\S+ +(\S.*)")
_BORDERS = frozenset(["InputOperator", "OutputOperator"])  # they compute nothing


def read_layers(text: str) -> list[dict[str, Any]]:
    """Read the compiler's own table of layers: what each is, who computes it and in how many cycles by its estimate."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        if (row := _ROW.search(line)) is None:
            continue
        number, kind, _, target, _, _, cycles, name = row.groups()
        if number == "0":
            found = []  # a later table is of the model as it is now
        if kind not in _BORDERS:
            found.append({"kind": kind, "target": target, "cycles": int(cycles), "name": name.strip()})
    return found


def placement(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the layers by who computes them."""
    kinds: dict[str, Counter[str]] = {}
    for layer in layers:
        kinds.setdefault(layer["target"], Counter())[layer["kind"]] += 1
    return [
        {
            "provider": "RKNN" if target == "NPU" else f"RKNN {target}",
            "n_nodes": sum(found.values()),
            "kinds": found.most_common(),
            "reason": "" if target == "NPU" else NOT_TAKEN,
        }
        for target, found in sorted(kinds.items(), reverse=True)
    ]
