"""edge_rt: a small runtime that serves INT4 models on edge devices.

The names below are imported when they are first used, so that the daemon does not pay for the library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_rt.chain_library import ChainModel
    from edge_rt.errors import EdgeRtError
    from edge_rt.library import Generation, Model, load, load_tensors, load_text
    from edge_rt.tensor_library import TensorModel
    from edge_rt.types import Message, ResponseFormat, Sampling, Tool, ToolCall

__all__ = [
    "ChainModel",
    "EdgeRtError",
    "Generation",
    "Message",
    "Model",
    "ResponseFormat",
    "Sampling",
    "TensorModel",
    "Tool",
    "ToolCall",
    "__version__",
    "load",
    "load_tensors",
    "load_text",
]

_HOME = {
    "ChainModel": "edge_rt.chain_library",
    "EdgeRtError": "edge_rt.errors",
    "Generation": "edge_rt.library",
    "Message": "edge_rt.types",
    "Model": "edge_rt.library",
    "ResponseFormat": "edge_rt.types",
    "Sampling": "edge_rt.types",
    "TensorModel": "edge_rt.tensor_library",
    "Tool": "edge_rt.types",
    "ToolCall": "edge_rt.types",
    "load": "edge_rt.library",
    "load_tensors": "edge_rt.library",
    "load_text": "edge_rt.library",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("edge_rt.version").VERSION
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'edge_rt' has no attribute {name!r}")
