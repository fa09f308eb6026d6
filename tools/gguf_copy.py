"""Copy a GGUF file with some of its keys and tensors changed. Needs gguf, which edge_rt does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray


def copy_gguf(
    source: Path,
    target: Path,
    *,
    keys: Mapping[str, float] | None = None,
    floats: Mapping[str, NDArray[np.float32]] | None = None,
    keeps: Callable[[str], bool] = lambda _: True,
) -> Path:
    """Write target, and give it.

    keys    new values of numbers that source has
    floats  tensors that come instead of those of these names, [n_rows, n_columns]
    keeps   says by its name whether a tensor is copied

    Raises ValueError for empty and nested arrays, which gguf does not write.
    """
    keys, floats = keys or {}, floats or {}
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.data_alignment = reader.alignment
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue  # the writer's own
        kind, *items = field.types
        if kind == gguf.GGUFValueType.ARRAY and (len(items) != 1 or not len(field.data)):
            raise ValueError(f"{source}: {name} is an empty or nested array, which is not copied")
        writer.add_key_value(name, keys.get(name, field.contents()), kind, items[0] if items else None)
    for tensor in reader.tensors:
        if tensor.name in floats:
            writer.add_tensor(tensor.name, floats[tensor.name])
        elif keeps(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
