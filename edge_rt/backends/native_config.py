"""What a GGUF header says of a model of the llama family, read for the native engine.

Every key of the architecture and every tensor has a meaning here, or the file is refused by its name: nothing that the
file asks for is passed over. Reads no weights.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_rt.backends.native_library import TYPES, Config, Layer
from edge_rt.catalog.gguf import GgufHeader
from edge_rt.catalog.gguf_reader import ArrayValue
from edge_rt.errors import BackendLoadError, ModelFormatError

_BASE_KEYS = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",  # says how the weights came to be; changes nothing
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    )
)
_YARN_KEYS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier")
_ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_SMALLEST = 2.0**-149  # of all floats above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a name in general.architecture adds to the common part.

    pairs_halves   RoPE turns elements i and i + n/2 together, not 2i and 2i + 1
    has_factors    tensors may change the frequencies of RoPE
    has_qk_norm    each head of q and k is normalised
    nope_every     every so many layers one has no RoPE; 0: all have
    extra_keys     keys known beside the common ones
    """

    pairs_halves: bool = False
    has_factors: bool = False
    has_qk_norm: bool = False
    nope_every: int = 0
    extra_keys: frozenset[str] = frozenset()


# As llama.cpp reads them (src/models/ and llama_model_rope_type, ggml 0.25). Mistral's files call themselves llama.
ARCHITECTURES = {
    "llama": Architecture(has_factors=True),
    "mistral3": Architecture(
        has_factors=True,
        extra_keys=frozenset(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")),
    ),
    "deci": Architecture(has_factors=True),
    "qwen2": Architecture(pairs_halves=True),
    "qwen3": Architecture(pairs_halves=True, has_qk_norm=True),
    "smollm3": Architecture(nope_every=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Without heads it has no attention; with heads but no KV heads, one matrix in place of it.

    n_ff    0: no feed-forward part
    window  tokens that a query sees, itself included; 0: all
    """

    n_heads: int
    n_kv_heads: int
    n_ff: int
    window: int
    uses_rope: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. The angles of a position are its product with the frequencies.

    scale             what the frequencies are multiplied with (all, or with yarn the slow ones)
    yarn_ramp         first and last pair between untouched and scaled; None without yarn
    attention_factor  what the turned q and k are multiplied with
    n_ctx_original    the context before it was stretched
    has_factors       the file has a list of divisors of the frequencies
    is_longrope       it has two, for short and for long contexts
    """

    base: float
    n_rot: int
    pairs_halves: bool
    scale: float
    yarn_ramp: tuple[float, float] | None
    attention_factor: float
    n_ctx_original: int
    has_factors: bool
    is_longrope: bool

    def factors_tensor(self, n_ctx: int) -> str | None:
        """Name the tensor that divides the frequencies, for a context that a sequence may fill."""
        if self.is_longrope:
            return _ROPE_LONG if n_ctx > self.n_ctx_original else _ROPE_SHORT
        return _ROPE_FREQS if self.has_factors else None

    def frequencies(self, factors: Sequence[float] | None) -> list[float]:
        """Give one frequency for each pair, with the divisors of factors_tensor where there is one."""
        n = self.n_rot // 2
        frequencies = []
        for i, factor in enumerate(factors if factors is not None else [1.0] * n):
            plain = self.base ** (-2 * i / self.n_rot) / factor
            kept = 0.0
            if self.yarn_ramp is not None:
                low, high = self.yarn_ramp
                kept = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            frequencies.append(plain * self.scale * (1 - kept) + plain * kept)
        return frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """A model as the engine computes it.

    temperature_scale, temperature_length  q of position p is multiplied with 1 + scale * ln(1 + p // length)
    """

    layers: tuple[LayerConfig, ...]
    n_embd: int
    head_dim: int
    n_vocab: int
    norm_eps: float
    rope: Rope
    temperature_scale: float
    temperature_length: int


def read_config(model: str, path: str, header: GgufHeader) -> NativeConfig:
    """Read what the engine needs to know. Raises BackendLoadError naming what it cannot compute."""
    return _Reader(model, path, header).read()


class _Reader:
    def __init__(self, model: str, path: str, header: GgufHeader):
        self._model = model
        self._path = path
        self._header = header
        self._arch = self._architecture()

    def _refuse(self, what: str) -> BackendLoadError:
        return BackendLoadError(model=self._model, reason=f"the native engine does not support {what}")

    def _architecture(self) -> Architecture:
        if (found := ARCHITECTURES.get(self._header.arch)) is None:
            raise self._refuse(f"the architecture {self._header.arch}")
        return found

    def read(self) -> NativeConfig:
        header = self._header
        prefix = f"{header.arch}."
        known = _BASE_KEYS | self._arch.extra_keys
        if unknown := sorted(k for k in header.metadata if k.startswith(prefix) and k[len(prefix) :] not in known):
            raise self._refuse(f"what the file asks for with {', '.join(unknown)}")
        if header.key_dim != header.value_dim:
            raise self._refuse("keys and values of different length")
        layers = tuple(self._layers())
        rope = self._rope()
        self._check_tensors(layers, rope)
        scale = self._number("attention.temperature_scale", 0.0, low=0.0)
        return NativeConfig(
            layers=layers,
            n_embd=header.embedding_length,
            head_dim=header.key_dim,
            n_vocab=header.n_vocab,
            norm_eps=self._number("attention.layer_norm_rms_epsilon", 1e-5),
            rope=rope,
            temperature_scale=scale,
            temperature_length=rope.n_ctx_original,
        )

    def _layers(self) -> Iterator[LayerConfig]:
        header = self._header
        windows = self._windows()
        for i, (n_heads, n_kv_heads, n_ff) in enumerate(
            zip(header.n_heads, header.n_kv_heads, header.n_ff, strict=True)
        ):
            if n_kv_heads and not n_heads:
                raise self._refuse(f"layer {i} with {n_kv_heads} KV heads and no heads")
            uses_rope = not self._arch.nope_every or (i + 1) % self._arch.nope_every != 0
            yield LayerConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, n_ff=n_ff, window=windows[i], uses_rope=uses_rope)

    def _windows(self) -> list[int]:
        """Read the window of each layer. llama.cpp passes it over for these architectures; the file asks for it."""
        window = self._integer("attention.sliding_window", 0, low=0)
        key, n = f"{self._header.arch}.attention.sliding_window_pattern", self._header.n_layers
        pattern = self._header.metadata.get(key)
        if pattern is None:
            return [window] * n
        if not isinstance(pattern, ArrayValue) or pattern.items is None or pattern.n_items != n:
            raise self._refuse(f"a {key} that is no list of {n} layers")
        if not all(isinstance(item, int) for item in pattern.items):
            raise self._refuse(f"a {key} that holds neither truth values nor whole numbers")
        return [window if has_window else 0 for has_window in pattern.items]

    def _rope(self) -> Rope:
        header = self._header
        kind = self._text("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise self._refuse(f"RoPE scaled by {kind} ({header.arch}.rope.scaling.type)")
        if kind != "yarn" and (odd := [k for k in _YARN_KEYS if f"{header.arch}.{k}" in header.metadata]):
            raise self._refuse(f"{header.arch}.{odd[0]} with RoPE scaled by {kind}")
        names = {t.name for t in header.tensors}
        n_rot = self._integer("rope.dimension_count", header.key_dim)
        if n_rot > header.key_dim:  # a list of so many is made from it
            raise self._refuse(f"a {header.arch}.rope.dimension_count of {n_rot}, above the head's {header.key_dim}")
        n_ctx_original = self._integer("rope.scaling.original_context_length", header.n_ctx_train)
        base = self._number("rope.freq_base", 10_000.0)
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind == "longrope" and factor != 1.0:
            raise self._refuse(f"{header.arch}.rope.scaling.factor with RoPE scaled by longrope")
        ramp, attention_factor = None, self._number("rope.scaling.attn_factor", 1.0)
        if kind == "yarn":
            ramp = self._yarn_ramp(base, n_rot, n_ctx_original)
            attention_factor *= _yarn_scale(factor, 1.0)
            attention_factor /= _yarn_scale(factor, self._number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0))
        return Rope(
            base=base,
            n_rot=n_rot,
            pairs_halves=self._arch.pairs_halves,
            scale=1.0 if kind == "none" else 1.0 / factor,
            yarn_ramp=ramp,
            attention_factor=attention_factor,
            n_ctx_original=n_ctx_original,
            has_factors=_ROPE_FREQS in names,
            is_longrope=kind == "longrope",
        )

    def _yarn_ramp(self, base: float, n_rot: int, n_ctx_original: int) -> tuple[float, float]:
        """Find the pairs that turn beta_fast and beta_slow times in the original context."""
        if base <= 1:
            raise self._refuse(f"RoPE scaled by yarn with a base of {base}")

        def pair(n_turns: float) -> float:
            return n_rot * math.log(n_ctx_original / (n_turns * 2 * math.pi)) / (2 * math.log(base))

        fast = self._number("rope.scaling.yarn_beta_fast", 32.0)
        slow = self._number("rope.scaling.yarn_beta_slow", 1.0)
        return max(0.0, math.floor(pair(fast))), min(n_rot - 1.0, math.ceil(pair(slow)))

    def _check_tensors(self, layers: tuple[LayerConfig, ...], rope: Rope) -> None:
        by_name = {t.name: t for t in self._header.tensors}
        wanted = {"token_embd.weight", "output_norm.weight", "output.weight", "output.bias"}
        factors = {_ROPE_LONG, _ROPE_SHORT} if rope.is_longrope else {_ROPE_FREQS} & by_name.keys()
        if factors and not self._arch.has_factors:
            raise self._refuse(f"{min(factors)} with the architecture {self._header.arch}")
        needed = set(factors)
        for i, layer in enumerate(layers):
            wanted.update(f"blk.{i}.{name}" for name in _layer_tensors(layer))
            if self._arch.has_qk_norm and layer.n_kv_heads:
                needed.update((f"blk.{i}.attn_q_norm.weight", f"blk.{i}.attn_k_norm.weight"))
        if extra := sorted(by_name.keys() - wanted - needed):
            raise self._refuse(f"the tensor {extra[0]}")
        if missing := sorted(needed - by_name.keys()):
            raise self._refuse(f"a file without {missing[0]}")
        for name in factors:
            if by_name[name].type != "F32" or by_name[name].shape != (rope.n_rot // 2,):
                raise self._refuse(f"{name} of another shape than {rope.n_rot // 2} numbers of F32")
        if types := sorted({t.type for t in self._header.tensors} - set(TYPES)):
            raise self._refuse(f"weights of type {', '.join(types)}")

    def _number(self, name: str, default: float, *, low: float | None = None) -> float:
        """Read a finite number, at least low, or so far above 0 as a float can be: then powers of it are finite too."""
        key = f"{self._header.arch}.{name}"
        value = self._header.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFormatError(path=self._path, field=key, problem=f"{value!r} is not a number")
        if not value >= (_SMALLEST if low is None else low) or not value < 2**31:
            raise ModelFormatError(path=self._path, field=key, problem=f"{value!r} is not a number in range")
        return float(value)

    def _integer(self, name: str, default: int, *, low: int = 1) -> int:
        value = self._number(name, default, low=low)
        if value != int(value):
            key = f"{self._header.arch}.{name}"
            raise ModelFormatError(path=self._path, field=key, problem=f"{value!r} is not a whole number")
        return int(value)

    def _text(self, name: str, default: str) -> str:
        key = f"{self._header.arch}.{name}"
        value = self._header.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(path=self._path, field=key, problem=f"{value!r} is not text")
        return value


def _yarn_scale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + 0.1 * multiplier * math.log(factor)


def _layer_tensors(layer: LayerConfig) -> Iterator[str]:
    """Name the tensors a layer may have, biases among them."""
    matrices: list[str] = []
    if layer.n_heads:
        yield "attn_norm.weight"
        if layer.n_kv_heads:
            matrices += ["attn_q", "attn_k", "attn_v", "attn_output"]
        else:
            yield "attn_output.weight"
    if layer.n_ff:
        yield "ffn_norm.weight"
        matrices += ["ffn_gate", "ffn_up", "ffn_down"]
    for name in matrices:
        yield f"{name}.weight"
        yield f"{name}.bias"


def engine_config(config: NativeConfig, factors: Sequence[float] | None) -> Config:
    """Write it as the engine takes it, with the divisors that rope.factors_tensor names."""
    rope, n = config.rope, len(config.layers)
    frequencies = rope.frequencies(factors)
    return Config(
        n_layers=n,
        n_embd=config.n_embd,
        head_dim=config.head_dim,
        n_vocab=config.n_vocab,
        n_rot=rope.n_rot,
        pairs_halves=rope.pairs_halves,
        temperature_length=config.temperature_length,
        temperature_scale=config.temperature_scale,
        norm_eps=config.norm_eps,
        attention_factor=rope.attention_factor,
        layers=(Layer * n)(*(Layer(w.n_heads, w.n_kv_heads, w.n_ff, w.window, w.uses_rope) for w in config.layers)),
        frequencies=(ctypes.c_double * len(frequencies))(*frequencies),
    )
