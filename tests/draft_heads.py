"""Tiny random draft heads, written as files, and what they guess: in numpy, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import Absent, ModelFile
from edge_rt.backends.native import NativeBackend
from edge_rt.catalog.draft_head import ARCH, KEY_N_FF, KEY_SHA256, VOCABULARY, model_sha256
from tests.gguf_files import GgufFile, Tensor
from tests.tiny_models import TinyModel, rms_norm

Array = NDArray[np.float64]
N_FF = 32


@dataclass(frozen=True, kw_only=True)
class TinyHead:
    """A head of a tiny model that knows some tokens."""

    model: TinyModel
    known: tuple[int, ...] = (0, 3, 4, 9, *range(20, 63, 2))
    seed: int = 1

    def weights(self) -> dict[str, Array]:
        rng, n = np.random.default_rng(self.seed), self.model.n_embd
        shapes = {"state": (n, n), "token": (n, n), "ffn_gate": (N_FF, n), "ffn_up": (N_FF, n), "ffn_down": (n, N_FF)}
        norms = ("state_norm", "token_norm", "ffn_norm", "output_norm")
        vectors = {f"{name}.weight": 1 + 0.3 * rng.standard_normal(n) for name in norms}
        matrices = {f"{name}.weight": rng.standard_normal(s) / math.sqrt(s[1]) for name, s in shapes.items()}
        return {name: w.astype(np.float32).astype(float) for name, w in (vectors | matrices).items()}

    def file(self, sha256: str) -> GgufFile:
        """Describe the file; its data are zeros."""
        file = GgufFile()
        file.set("general.architecture", "string", ARCH)
        file.set(KEY_SHA256, "string", sha256)
        file.set(KEY_N_FF, "u32", N_FF)
        file.tensors = [Tensor(name, w.shape[::-1]) for name, w in self.weights().items()]
        file.tensors.append(Tensor(VOCABULARY, (len(self.known),), "I32"))
        return file

    def write(self, path: Path, model: ModelFile) -> Path:
        """Write the head for a model's file."""
        file = self.file(model_sha256(model.path, model.header))
        data = bytearray()
        for values in (*(w.astype(np.float32) for w in self.weights().values()), np.array(self.known, np.int32)):
            data += values.tobytes()
            data += bytes(-len(data) % file.alignment)
        raw = file.encode()
        path.write_bytes(raw[: len(raw) - len(data)] + data)
        return path

    def guesses(self, ids: list[int], token_id: int, n: int) -> list[tuple[int, float]]:
        """Compute n guesses behind token_id, which follows ids, and their chances among the known tokens."""
        w, model = self.weights(), self.model.weights()
        embedding = model["token_embd.weight"]
        output = model.get("output.weight", embedding)
        x, found = self.model.states(ids)[-1], []
        for _ in range(n):
            e = rms_norm(embedding[token_id], w["token_norm.weight"])
            x = w["state.weight"] @ rms_norm(x, w["state_norm.weight"]) + w["token.weight"] @ e
            y = rms_norm(x, w["ffn_norm.weight"])
            gate = w["ffn_gate.weight"] @ y
            x = x + w["ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up.weight"] @ y))
            logits = output[list(self.known)] @ rms_norm(x, w["output_norm.weight"])
            chances = np.exp(logits - logits.max())
            best = int(logits.argmax())
            token_id = self.known[best]
            found.append((token_id, float(chances[best] / chances.sum())))
        return found


def need_native() -> None:
    """Skip where the native engine is not here."""
    if isinstance(NativeBackend().probe(), Absent):
        pytest.skip("the native engine is not here", allow_module_level=True)
