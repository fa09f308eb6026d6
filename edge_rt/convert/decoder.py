"""Find a decoder of the llama family in an ONNX graph, as ONNX Runtime GenAI's builder writes it.

The graph is walked from the logits back to the token ids, and every node on the way must be the one that the
architecture has there. What is left over may only compute lengths and positions. So nothing is guessed from names,
and nothing is passed over: what does not fit is refused by the node's name.
Shapes of nodes: microsoft/onnxruntime-genai, src/python/py/models/builders/base.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_rt.backends.native_config import LayerConfig, NativeConfig
from edge_rt.convert.graph import FLOATS, Graph, label
from edge_rt.convert.weights import Matrix, read_matrix

# What may compute lengths and positions out of the attention mask and the ids.
_POSITION_OPS = frozenset(
    (
        *("Add", "Cast", "Concat", "Constant", "ConstantOfShape", "CumSum", "Equal", "Expand", "Gather", "Greater"),
        *("Identity", "Less", "Max", "Min", "Mul", "Range", "ReduceMax", "ReduceSum", "Reshape", "Shape", "Slice"),
        *("Squeeze", "Sub", "Unsqueeze", "Where"),
    )
)
_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_ATTENTION_ATTRIBUTES = frozenset(
    ("num_heads", "kv_num_heads", "scale", "local_window_size", "do_rotary", "rotary_interleaved")
)


@dataclass(slots=True)
class Decoder:
    """What was found, by GGUF's names.

    matrices    weights, in the rows' order of GGUF
    vectors     norms and biases, likewise
    embedding   the initialiser of the embedding, and whether it is stored [n_embd, n_vocab]
    """

    matrices: dict[str, Matrix] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    embedding: tuple[str, bool] = ("", False)


@dataclass(frozen=True, slots=True)
class _Linear:
    matrix: Matrix
    bias: NDArray[np.float32] | None
    input: str
    label: str


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: NDArray[np.float32]
    addends: tuple[str, ...]
    total: str
    label: str


class DecoderWalk:
    """One walk through a graph.

    config          what the model's hyperparameters are; the graph must agree
    permutes_heads  whether GGUF has the rows of q and k in the order of neighbours, as for llama
    has_qk_norm     whether each head of q and k is normalised
    frequencies     of RoPE, with which the caches of cosines and sines must agree
    """

    def __init__(
        self, graph: Graph, config: NativeConfig, *, permutes_heads: bool, has_qk_norm: bool, frequencies: list[float]
    ):
        self._graph = graph
        self._config = config
        self._permutes_heads = permutes_heads
        self._has_qk_norm = has_qk_norm
        self._frequencies = np.asarray(frequencies)
        self._positions: list[str] = []
        self._caches: set[tuple[str, str]] = set()
        self._found = Decoder()

    def run(self) -> Decoder:
        graph = self._graph
        if "logits" not in graph.outputs:
            graph.fail("graph", "it has no output 'logits'")
        head = self._linear("logits", "output 'logits'")
        norm = self._norm(head.input, head.label)
        self._found.vectors["output_norm.weight"] = norm.weight
        for index in reversed(range(len(self._config.layers))):
            norm = self._layer(index, self._config.layers[index], norm)
        if len(norm.addends) != 1:
            graph.fail(norm.label, "the first layer's input is a sum")
        self._embedding(norm.addends[0], norm.label)
        self._head(head)
        self._check_caches()
        self._check_rest()
        return self._found

    def _layer(self, index: int, layer: LayerConfig, after: _Norm) -> _Norm:
        """Walk one layer, whose end is what `after` normalises; give the norm at its beginning."""
        put = self._putter(index)
        down, residual = self._branch(after)
        put("ffn_down", down, self._config.n_embd, layer.n_ff)
        gate, up = self._gated(down)
        if gate.input != up.input:
            self._graph.fail(up.label, f"it and {gate.label} have different inputs")
        put("ffn_gate", gate, layer.n_ff, self._config.n_embd)
        put("ffn_up", up, layer.n_ff, self._config.n_embd)
        ffn_norm = self._norm(gate.input, gate.label)
        self._check_residual(ffn_norm, residual)
        self._found.vectors[f"blk.{index}.ffn_norm.weight"] = ffn_norm.weight

        out, residual = self._branch(ffn_norm)
        head_dim, n_heads, n_kv_heads = self._config.head_dim, layer.n_heads, layer.n_kv_heads
        put("attn_output", out, self._config.n_embd, n_heads * head_dim)
        q, k, v = self._attention(index, layer, out)
        for name, linear, n in (("attn_q", q, n_heads), ("attn_k", k, n_kv_heads), ("attn_v", v, n_kv_heads)):
            if linear.input != q.input:
                self._graph.fail(linear.label, f"it and {q.label} have different inputs")
            order = _neighbours(n, head_dim) if self._permutes_heads and name != "attn_v" else None
            put(name, linear, n * head_dim, self._config.n_embd, order)
        attn_norm = self._norm(q.input, q.label)
        self._check_residual(attn_norm, residual)
        self._found.vectors[f"blk.{index}.attn_norm.weight"] = attn_norm.weight
        return attn_norm

    def _putter(self, index: int) -> Callable[..., None]:
        def put(name: str, linear: _Linear, n_rows: int, n_cols: int, order: NDArray[np.intp] | None = None) -> None:
            if linear.matrix.shape != (n_rows, n_cols):
                self._graph.fail(
                    linear.label, f"its shape is {linear.matrix.shape}, {name} of --vocab says {(n_rows, n_cols)}"
                )
            self._found.matrices[f"blk.{index}.{name}.weight"] = linear.matrix.reordered(order)
            if linear.bias is not None:
                self._found.vectors[f"blk.{index}.{name}.bias"] = linear.bias if order is None else linear.bias[order]

        return put

    def _branch(self, norm: _Norm) -> tuple[_Linear, str]:
        """Tell what a layer's part adds from what it adds to."""
        if len(norm.addends) != 2:
            self._graph.fail(norm.label, "a sum of two is expected as its input")
        linear = [a for a in norm.addends if self._is_linear(a)]
        if len(linear) != 1:
            self._graph.fail(norm.label, "one of its inputs must be a matrix product and the other the residual")
        residual = next(a for a in norm.addends if a != linear[0])
        return self._linear(linear[0], norm.label), self._graph.source(residual)

    def _is_linear(self, value: str) -> bool:
        node = self._graph.maker(self._graph.source(value))
        return node is not None and node.op_type in ("MatMulNBits", "MatMul", "Add")

    def _check_residual(self, norm: _Norm, residual: str) -> None:
        total = norm.total if len(norm.addends) == 2 else self._graph.source(norm.addends[0])
        if total != residual:
            self._graph.fail(norm.label, f"the residual {residual!r} does not come from here")

    def _norm(self, value: str, after: str) -> _Norm:
        graph, node = self._graph, self._graph.producer(value, after)
        name, source = label(node), graph.source(value)
        if node.op_type not in _NORMS or node.output[0] != source:
            graph.fail(name, f"{' or '.join(_NORMS)} is expected before {after}")
        n_addends = 2 if node.op_type.startswith("Skip") else 1
        if len(node.input) <= n_addends or any(node.input[n_addends + 1 :]):
            graph.fail(name, "a weight and nothing else is expected beside its inputs")
        eps = graph.number(node, "epsilon", 1e-5 if n_addends == 1 else 1e-12)
        if not math.isclose(eps, self._config.norm_eps, rel_tol=1e-3):
            graph.fail(name, f"its epsilon is {eps:g}, --vocab says {self._config.norm_eps:g}")
        weight = self._vector(node.input[n_addends], name, self._config.n_embd)
        total = node.output[3] if n_addends == 2 and len(node.output) > 3 else ""
        return _Norm(weight, tuple(node.input[:n_addends]), total, name)

    def _vector(self, value: str, after: str, n: int) -> NDArray[np.float32]:
        if self._graph.shape(value, after) != (n,):
            self._graph.fail(value, f"its shape is {self._graph.shape(value, after)}, {(n,)} is expected")
        values = np.asarray(self._graph.array(value, after, FLOATS), np.float32)
        if not np.isfinite(values).all():
            self._graph.fail(value, "it has values that are no finite numbers")
        return values

    def _linear(self, value: str, after: str) -> _Linear:
        graph, node = self._graph, self._graph.producer(value, after)
        bias_name = ""
        outer = label(node)
        if node.op_type == "Add":
            biases = [i for i in node.input if graph.source(i) in graph.initializers]
            if len(biases) != 1 or len(node.input) != 2:
                graph.fail(outer, "a sum with a bias is expected")
            bias_name = biases[0]
            node = graph.producer(next(i for i in node.input if i != bias_name), outer)
        name = label(node)
        matrix = read_matrix(graph, node)
        if node.op_type == "MatMulNBits" and len(node.input) > 5 and node.input[5]:
            if bias_name:
                graph.fail(name, "it has two biases")
            bias_name = node.input[5]
        bias = self._vector(bias_name, outer, matrix.shape[0]) if bias_name else None
        return _Linear(matrix, bias, graph.source(node.input[0]), name)

    def _gated(self, down: _Linear) -> tuple[_Linear, _Linear]:
        """Read up * silu(gate), where silu(gate) is gate * sigmoid(gate)."""
        product = self._expect(down.input, "Mul", down.label)
        for silu, up in _both_ways(product):
            node = self._graph.maker(self._graph.source(silu))
            for gate, sigmoid in _both_ways(node) if node is not None and node.op_type == "Mul" else ():
                inner = self._graph.maker(self._graph.source(sigmoid))
                if inner is not None and inner.op_type == "Sigmoid" and inner.input[0] == gate:
                    after = label(self._graph.producer(silu, label(product)))
                    self._graph.producer(sigmoid, after)
                    return self._linear(gate, after), self._linear(up, label(product))
        problem = "gate * sigmoid(gate) * up is expected, other activations are not known here"
        raise self._graph.error(label(product), problem)

    def _expect(self, value: str, op: str, after: str) -> NodeProto:
        node = self._graph.producer(value, after)
        if node.op_type != op:
            self._graph.fail(label(node), f"{op} is expected before {after}")
        return node

    def _attention(self, index: int, layer: LayerConfig, out: _Linear) -> tuple[_Linear, _Linear, _Linear]:
        graph = self._graph
        node = self._expect(out.input, "GroupQueryAttention", out.label)
        name, inputs = label(node), [*node.input, *[""] * 12]
        does_rotary = bool(graph.integer(node, "do_rotary"))
        self._check_attention(node, layer)
        if graph.source(out.input) != node.output[0] or any(inputs[10:]) or inputs[9] not in ("", "position_ids"):
            graph.fail(name, "it has inputs or outputs that are not known here")
        for value in inputs[3:5]:
            if value not in graph.inputs:
                graph.fail(name, f"the past {value!r} is no input of the graph")
        self._positions += inputs[5:7]
        if does_rotary:
            self._caches.add((inputs[7], inputs[8]))
        if not inputs[1] and not inputs[2]:
            if not does_rotary or self._has_qk_norm:
                graph.fail(name, "packed q, k and v without RoPE inside, or with norms of q and k, are not known here")
            return self._split(self._linear(inputs[0], name), layer)
        q, k = (
            self._head_input(index, value, n, kind, has_rope=not does_rotary, after=name)
            for value, n, kind in ((inputs[0], layer.n_heads, "q"), (inputs[1], layer.n_kv_heads, "k"))
        )
        return q, k, self._linear(inputs[2], name)

    def _check_attention(self, node: NodeProto, layer: LayerConfig) -> None:
        graph, name = self._graph, label(node)
        graph.only_attributes(node, _ATTENTION_ATTRIBUTES)
        counts = (graph.integer(node, "num_heads"), graph.integer(node, "kv_num_heads"))
        if counts != (layer.n_heads, layer.n_kv_heads):
            graph.fail(name, f"it has {counts[0]} heads and {counts[1]} of them for K and V, --vocab says otherwise")
        plain = 1 / math.sqrt(self._config.head_dim)
        if not math.isclose(scale := graph.number(node, "scale", 0.0) or plain, plain, rel_tol=1e-3):
            graph.fail(name, f"its scale is {scale:g}, {plain:g} is expected")
        window = max(graph.integer(node, "local_window_size", -1), 0)
        if window != layer.window:
            graph.fail(name, f"its window is {window or 'none'}, --vocab says {layer.window or 'none'}")
        if graph.integer(node, "rotary_interleaved"):
            graph.fail(name, "RoPE that turns neighbours is not what Hugging Face's models have")

    def _split(self, packed: _Linear, layer: LayerConfig) -> tuple[_Linear, _Linear, _Linear]:
        n_q, n_kv = layer.n_heads * self._config.head_dim, layer.n_kv_heads * self._config.head_dim
        if packed.matrix.shape[0] != n_q + 2 * n_kv:
            self._graph.fail(packed.label, f"it has {packed.matrix.shape[0]} rows, q, k and v have {n_q + 2 * n_kv}")
        q, k, v = (
            _Linear(
                packed.matrix.rows(slice(start, stop)),
                None if packed.bias is None else packed.bias[start:stop],
                packed.input,
                packed.label,
            )
            for start, stop in ((0, n_q), (n_q, n_q + n_kv), (n_q + n_kv, n_q + 2 * n_kv))
        )
        return q, k, v

    def _head_input(self, index: int, value: str, n: int, kind: str, *, has_rope: bool, after: str) -> _Linear:
        """Walk q or k back over RoPE and the norm of its heads."""
        graph = self._graph
        if has_rope:
            node = self._expect(value, "RotaryEmbedding", after)
            if graph.integer(node, "interleaved") or graph.number(node, "scale", 1.0) != 1.0:
                graph.fail(label(node), "only plain RoPE of halves is known here")
            n_rot = graph.integer(node, "rotary_embedding_dim")
            if n_rot not in (0, len(self._frequencies) * 2):
                graph.fail(label(node), f"it turns {n_rot} elements, --vocab says {len(self._frequencies) * 2}")
            self._positions.append(node.input[1])
            self._caches.add((node.input[2], node.input[3]))
            value, after = node.input[0], label(node)
        if self._has_qk_norm:
            outer = self._expect(value, "Reshape", after)
            norm = self._expect(outer.input[0], "SimplifiedLayerNormalization", label(outer))
            inner = self._expect(norm.input[0], "Reshape", label(norm))
            eps = graph.number(norm, "epsilon", 1e-5)
            if not math.isclose(eps, self._config.norm_eps, rel_tol=1e-3):
                graph.fail(label(norm), f"its epsilon is {eps:g}, --vocab says {self._config.norm_eps:g}")
            for reshape, last in ((outer, n * self._config.head_dim), (inner, self._config.head_dim)):
                to = graph.array(reshape.input[1], label(reshape), (np.dtype("<i8"),))
                if to.ndim != 1 or to[-1] != last:
                    graph.fail(label(reshape), f"it makes rows of {to.tolist()}, {last} is expected")
            weight = self._vector(norm.input[1], label(norm), self._config.head_dim)
            self._found.vectors[f"blk.{index}.attn_{kind}_norm.weight"] = weight
            value, after = inner.input[0], label(inner)
        return self._linear(value, after)

    def _embedding(self, value: str, after: str) -> None:
        graph = self._graph
        node = self._expect(value, "Gather", after)
        table, ids = node.input[:2]
        if ids != "input_ids" or graph.integer(node, "axis") != 0:
            graph.fail(label(node), "rows of the embedding for 'input_ids' are expected")
        is_turned = graph.source(table) not in graph.initializers
        if is_turned:
            turn = self._expect(table, "Transpose", label(node))
            if graph.integers(turn, "perm", (1, 0)) != (1, 0):
                graph.fail(label(turn), "another order than rows and columns exchanged")
            table = turn.input[0]
        shape, wanted = graph.shape(table, label(node)), (self._config.n_vocab, self._config.n_embd)
        if (shape[::-1] if is_turned else shape) != wanted:
            graph.fail(table, f"its shape is {shape}, the vocabulary and width of --vocab are {wanted}")
        if graph.dtype(table, label(node)) not in FLOATS:
            graph.fail(table, "an embedding that is not of floats is not known here")
        self._found.embedding = (table, is_turned)

    def _head(self, head: _Linear) -> None:
        wanted = (self._config.n_vocab, self._config.n_embd)
        if head.matrix.shape != wanted:
            self._graph.fail(head.label, f"its shape is {head.matrix.shape}, --vocab says {wanted}")
        if head.bias is not None:
            self._found.vectors["output.bias"] = head.bias
        if head.matrix.initializer != self._found.embedding[0]:
            self._found.matrices["output.weight"] = head.matrix

    def _check_caches(self) -> None:
        """Compare the first rows of the cosines and sines with what the hyperparameters say."""
        graph, factor = self._graph, self._config.rope.attention_factor
        for names in self._caches:
            for name, function in zip(names, (np.cos, np.sin), strict=True):
                cache = graph.array(name, "RoPE", FLOATS)
                if cache.ndim != 2 or cache.shape[1] != len(self._frequencies):
                    graph.fail(name, f"its shape is {cache.shape}, --vocab says {len(self._frequencies)} angles")
                rows = cache[:16].astype(float)
                wanted = function(np.arange(len(rows))[:, None] * self._frequencies) * factor
                if (worst := float(np.abs(rows - wanted).max())) > 4e-3:
                    graph.fail(name, f"its angles are not those of --vocab's RoPE, they differ by {worst:.3g}")

    def _check_rest(self) -> None:
        """See that what was not walked over computes lengths and positions only."""
        graph = self._graph
        for node in self._ancestors():
            if node.op_type not in _POSITION_OPS or node.domain not in ("", "ai.onnx"):
                graph.fail(label(node), "it is not known as a part of lengths and positions")
            graph.seen.add(id(node))
            graph.used.update(name for name in node.input if name in graph.initializers)
        for node in graph.nodes:
            if id(node) not in graph.seen:
                graph.fail(label(node), "nothing known here makes use of it")
        if left := sorted(graph.initializers.keys() - graph.used):
            graph.fail(left[0], "an initialiser that nothing known here makes use of")

    def _ancestors(self) -> Iterator[NodeProto]:
        todo, done = list(self._positions), set[str]()
        while todo:
            value = todo.pop()
            node = self._graph.maker(value)
            if value in done or node is None:
                continue
            done.add(value)
            if id(node) not in self._graph.seen:
                yield node
            todo += node.input


def _both_ways(node: NodeProto) -> tuple[tuple[str, str], tuple[str, str]]:
    a, b = node.input
    return (a, b), (b, a)


def _neighbours(n_heads: int, head_dim: int) -> NDArray[np.intp]:
    """Order rows so that elements i and i + n/2 of a head stand beside each other."""
    return np.arange(n_heads * head_dim).reshape(n_heads, 2, head_dim // 2).swapaxes(1, 2).ravel()
