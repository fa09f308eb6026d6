"""A table of tokens' vectors, as wordllama's safetensors have it, into an ONNX graph that looks them up.

Input: input_ids, INT64 [batch, sequence]. Output: token_vectors, FP32 [batch, sequence, size]. The mean of a text's is
its embedding, which is the pipeline's to take. Built from the same weights, the file is the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from edge_rt.convert.onnx_build import OnnxBuilder
from edge_rt.convert.safetensors_file import read_safetensors
from edge_rt.errors import ModelFormatError

_TENSOR = "embedding.weight"


def convert_word_vectors(src: Path, dst: Path, beside: Path | None) -> None:
    """Write the ONNX file of one table of finite half-precision floats. Raises ModelFormatError."""
    del beside
    table = read_safetensors(src).get(_TENSOR)
    if table is None or table.dtype != np.float16 or table.ndim != 2 or not np.isfinite(table).all():
        raise ModelFormatError(path=src.name, field=_TENSOR, problem="must be F16 [tokens, size] of finite numbers")
    builder = OnnxBuilder({})
    builder.constant("table", table)
    builder.node("Gather", ["table", "input_ids"], "rows", axis=0)
    builder.node("Cast", ["rows"], "token_vectors", to=TensorProto.FLOAT)
    shape = ["batch", "sequence"]
    model = builder.model(
        "word_vectors",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("token_vectors", TensorProto.FLOAT, [*shape, table.shape[1]])],
    )
    dst.write_bytes(model.SerializeToString(deterministic=True))
