"""Cut an ONNX graph into products for the FPGA's engine and parts for onnxruntime between them. Pure.

Every node has a stage: that of the nodes it waits for, and one more where it waits for a product. So a model has at
most as many parts as the longest chain of products, however many branches it has. Nodes that only unfold constants are
put into every part that reads what they make, so that onnxruntime folds them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from edge_rt.backends.fpga_cycles import MIN_INTENSITY
from edge_rt.backends.fpga_onnx_graph import OnnxGraph, tensor_bytes
from edge_rt.backends.fpga_onnx_products import K_MAX, Product, find_product
from edge_rt.backends.onnx_facts import OnnxModel
from edge_rt.backends.onnx_open import ACCURACY_LEVEL
from edge_rt.errors import ModelFormatError
from edge_rt.tensor_types import NodePlacement

FPGA, CPU = "FpgaExecution", "CPUExecutionProvider"
MAX_PRODUCTS = 512
_SPARE_BYTES = 64 * 2**20  # that parts may take for constants which several of them read
_NO_PRODUCT = "no product with INT4 or INT8 weights"
# What only unfolds its input: a copy in each part costs little more than the constant.
_UNFOLDING = frozenset(
    {"Constant", "Cast", "DequantizeLinear", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_MAX_UNFOLDING = 4
_MAX_COPIES = 8  # of the graph's nodes, in all parts together


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is worth the engine: rows of at most k_max weights, and multiplications per byte that crosses."""

    k_max: int = K_MAX
    min_intensity: float = MIN_INTENSITY


DEFAULT_RULE = Rule()
NOTHING: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes for onnxruntime; inputs and outputs are values that others make and read."""

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Step = Part | Product


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in order, and where each node of the graph went.

    stayed  why nodes stay on the CPU, by node; absorbed: nodes whose work is a product's, as weights' DequantizeLinear
    """

    steps: tuple[Step, ...]
    stayed: Mapping[int, str]
    absorbed: tuple[int, ...]
    graph: OnnxGraph = field(repr=False)

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(step for step in self.steps if isinstance(step, Product))

    def placement(self) -> tuple[NodePlacement, ...]:
        """Count the file's nodes: those of the engine, and those of the CPU by the reason they are there."""
        kinds: dict[tuple[str, str], Counter[str]] = {}
        nodes = self.graph.nodes
        for at in (*(product.at for product in self.products), *self.absorbed):
            kinds.setdefault((FPGA, ""), Counter())[nodes[at].op_type] += 1
        for at in dict.fromkeys(at for step in self.steps if isinstance(step, Part) for at in step.nodes):
            reason = self.stayed.get(at) or _NO_PRODUCT
            kinds.setdefault((CPU, reason), Counter())[nodes[at].op_type] += 1
        return tuple(
            NodePlacement(provider=name, n_nodes=found.total(), kinds=tuple(found.most_common()), reason=reason)
            for (name, reason), found in kinds.items()
        )


def plan(graph: OnnxGraph, rule: Rule = DEFAULT_RULE, refused: Mapping[int, str] = NOTHING) -> Plan:
    """Cut a graph. refused names nodes that shall stay on the CPU and why."""
    products: dict[int, Product] = {}
    stayed = dict(refused)
    for at in graph.order:
        if at in refused:
            continue
        found = find_product(graph, at, k_max=rule.k_max, min_intensity=rule.min_intensity)
        if isinstance(found, Product) and len(products) == MAX_PRODUCTS:
            found = f"the engine has {MAX_PRODUCTS} products already"
        if isinstance(found, Product):
            products[at] = found
        elif found:
            stayed[at] = found
    whole = _live(graph, {})
    live = _live(graph, products)
    products = {at: product for at, product in products.items() if at in live}
    stage = _stages(graph, products, live)
    return Plan(_steps(graph, products, live, stage), stayed, tuple(sorted(whole - live)), graph)


def part_model(graph: OnnxGraph, part: Part, types: Mapping[str, ValueInfoProto]) -> ModelProto:
    """Give a part as a model of its own; types are those of its inputs."""
    proto = GraphProto(name="part")
    proto.node.extend(_fast(graph.nodes[at]) for at in part.nodes)
    proto.initializer.extend(graph.initial[name] for name in _constants_of(graph, part.nodes))
    proto.input.extend(types[name] for name in part.inputs)
    proto.output.extend(ValueInfoProto(name=name) for name in part.outputs)
    model = ModelProto(ir_version=max(4, graph.model.ir_version), graph=proto)  # since 4 constants are no inputs
    model.opset_import.extend(graph.model.opset_import)
    model.functions.extend(graph.model.functions)
    return model


def check_constants(found: Plan, model: OnnxModel) -> None:
    """Refuse a plan whose parts would hold constants, or nodes that unfold them, over and over.

    Raises ModelFormatError.
    """
    n_nodes = sum(len(part.nodes) for part in found.steps if isinstance(part, Part))
    if n_nodes > (limit := _MAX_COPIES * len(found.graph.nodes)):
        problem = f"its parts between products would hold {n_nodes} nodes, the limit is {limit}"
        raise ModelFormatError(path=str(model.path), field="graph.node", problem=problem)
    sizes = {name: tensor_bytes(tensor) for name, tensor in found.graph.initial.items()}
    functions_bytes = sum(function.ByteSize() for function in found.graph.model.functions)
    limit = 2 * (model.file_bytes + model.external_bytes) + _SPARE_BYTES
    total = 0
    for part in found.steps:
        if isinstance(part, Part):
            total += functions_bytes + sum(sizes[name] for name in _constants_of(found.graph, part.nodes))
    if total > limit:
        problem = (
            f"its parts between products would hold {total} bytes of constants and functions, the limit is {limit}"
        )
        raise ModelFormatError(path=str(model.path), field="graph.initializer", problem=problem)


def _live(graph: OnnxGraph, products: Mapping[int, Product]) -> set[int]:
    """Find the nodes that the outputs need, if products read what they take and nothing else."""
    live: set[int] = set()
    wanted = [graph.maker[name] for name in graph.outputs if name in graph.maker]
    while wanted:
        if (at := wanted.pop()) in live:
            continue
        live.add(at)
        names = (products[at].value,) if at in products else graph.reads[at]
        wanted += [graph.maker[name] for name in names if name in graph.maker]
    return live


def _stages(graph: OnnxGraph, products: Mapping[int, Product], live: set[int]) -> dict[int, int]:
    """Give the stage of each live node; a product of a stage runs after the stage's part."""
    stage: dict[int, int] = {}
    for at in graph.order:
        if at not in live:
            continue
        names = (products[at].value,) if at in products else graph.reads[at]
        before = {graph.maker[name] for name in names if name in graph.maker}
        is_after = at not in products
        stage[at] = max((stage[b] + (is_after and b in products) for b in before), default=0)
    return stage


def _steps(
    graph: OnnxGraph, products: Mapping[int, Product], live: set[int], stage: Mapping[int, int]
) -> tuple[Step, ...]:
    unfolding = _unfolding(graph, live, products)
    parts: dict[int, list[int]] = {}
    chains: dict[int, list[Product]] = {}
    for at in graph.order:
        if at in products:
            chains.setdefault(stage[at], []).append(products[at])
        elif at in live and at not in unfolding:
            parts.setdefault(stage[at], []).append(at)
    # An unfolded constant that a product takes, or that is an output, is made in the first part.
    taken = set(graph.outputs) | {product.value for product in products.values()}
    if first := [at for at in sorted(unfolding) if taken & set(graph.nodes[at].output)]:
        parts.setdefault(0, []).extend(first)
    position = {at: i for i, at in enumerate(graph.order)}
    home = {at: number for number, own in parts.items() for at in own}
    steps: list[Step] = []
    for number in range(max((*parts, *chains), default=-1) + 1):
        if own := parts.get(number):
            nodes = sorted({*own, *_needed(graph, own, unfolding)}, key=position.__getitem__)
            steps.append(_part(graph, nodes, own, home, number, taken))
        steps += chains.get(number, ())
    return tuple(steps)


def _part(
    graph: OnnxGraph,
    nodes: list[int],
    own: list[int],
    home: Mapping[int, int],
    number: int,
    taken: set[str],
) -> Part:
    inside = {name for at in nodes for name in graph.nodes[at].output}
    inputs = dict.fromkeys(
        name for at in nodes for name in graph.reads[at] if name not in inside and name not in graph.initial
    )
    leaving = [
        name
        for at in own
        for name in graph.nodes[at].output
        if name and (name in taken or any(home.get(reader, number) != number for reader in graph.readers.get(name, ())))
    ]
    return Part(tuple(nodes), tuple(inputs), tuple(leaving))


def _unfolding(graph: OnnxGraph, live: set[int], products: Mapping[int, Product]) -> set[int]:
    """Find the nodes that unfold constants, up to _MAX_UNFOLDING of them in a row: what follows is made once."""
    depth: dict[int, int] = {}
    for at in graph.order:
        if at not in live or at in products:
            continue
        node = graph.nodes[at]
        if node.op_type in _UNFOLDING and node.domain in ("", "ai.onnx"):
            before = [graph.maker.get(name, -1) for name in graph.reads[at] if name not in graph.constants]
            if all(depth.get(maker, _MAX_UNFOLDING) < _MAX_UNFOLDING for maker in before):
                depth[at] = 1 + max((depth[maker] for maker in before), default=0)
    return set(depth)


def _needed(graph: OnnxGraph, nodes: Iterable[int], unfolding: set[int]) -> set[int]:
    found: set[int] = set()
    wanted = list(nodes)
    while wanted:
        for name in graph.reads[wanted.pop()]:
            if (maker := graph.maker.get(name)) is not None and maker in unfolding and maker not in found:
                found.add(maker)
                wanted.append(maker)
    return found


def _constants_of(graph: OnnxGraph, nodes: Iterable[int]) -> dict[str, None]:
    return dict.fromkeys(name for at in nodes for name in graph.reads[at] if name in graph.initial)


def _fast(node: NodeProto) -> NodeProto:
    """Let a MatMulNBits that stays compute with 8 bits, as onnx_cpu does."""
    if node.op_type != "MatMulNBits":
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    kept = [each for each in node.attribute if each.name != "accuracy_level"]
    del copy.attribute[:]
    copy.attribute.extend([*kept, helper.make_attribute("accuracy_level", ACCURACY_LEVEL)])
    return copy
