"""Children of a GGUF model that keep its first layers: cheap to compute, and hardly ever right."""

from __future__ import annotations

from pathlib import Path

import gguf


def keep_layers(source: Path, target: Path, n_layers: int) -> None:
    """Write a model with the first n_layers layers of another, and everything else of it."""
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch=arch)
    for key in reader.fields.values():
        if key.name == "general.architecture" or key.name.startswith("GGUF."):
            continue
        is_array = key.types[0] == gguf.GGUFValueType.ARRAY
        value = n_layers if key.name == f"{arch}.block_count" else key.contents()
        writer.add_key_value(key.name, value, key.types[0], sub_type=key.types[-1] if is_array else None)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < n_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
