"""The order of an ONNX graph's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter

from onnx import NodeProto


def in_order(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """Give nodes behind those that they read, whatever the file's order: quantisers append theirs at the end.

    Raises ValueError, with the first of them, where nodes wait for one another.
    """
    makers = {output: n for n, node in enumerate(nodes) for output in node.output}
    order: TopologicalSorter[int] = TopologicalSorter()
    for n, node in enumerate(nodes):
        order.add(n, *sorted({makers[value] for value in node.input if value in makers}))
    return (nodes[n] for n in order.static_order())
