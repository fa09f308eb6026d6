"""Check and optimise an ONNX model for its first load, in a process of its own.

`python -m edge_rt.worker.prepare LOAD` is that process, LOAD a Load message in JSON. Reading the file with onnx and
optimising it takes 30 MiB and more beyond the model, of which a worker that did it would keep half. What the process
leaves is the copy of the optimised graph, with the facts that the checks found, and the worker opens that. Its stdout
holds an error of ours as one JSON line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from edge_rt.backends.base import TensorSession
from edge_rt.backends.dispatch import AUTO, TENSOR_PREFERENCE
from edge_rt.errors import EdgeRtError
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.tensor_load import load_tensor_session, unpack_tensor

_BACKEND = "onnx_cpu"


def load_prepared(load: Load) -> TensorSession:
    """Load the model that this process is there for, prepared. Raises what load_tensor_session raises."""
    prepare(load)
    return load_tensor_session(load, is_alone=True)


def prepare(load: Load, run: Callable[[Load], object] | None = None) -> None:
    """Let the process check and optimise the model, if it can and nobody has. Raises what its load raises.

    run  instead of the process
    """
    tensor = load.tensor or TensorLoad()
    names = (tensor.backends or TENSOR_PREFERENCE) if load.backend == AUTO else (load.backend,)
    if _BACKEND not in names:
        return
    from edge_rt.backends.onnx_cpu import OnnxCpuBackend

    if not OnnxCpuBackend().is_unprepared(*unpack_tensor(load)):
        return
    # What the manifest says beyond the model file is not looked at, and may be long.
    tensor = msgspec.structs.replace(tensor, pipeline=None, state=(), assets={})
    (run or _run)(msgspec.structs.replace(load, tensor=tensor, chat_template=None))


def _run(load: Load) -> None:
    from edge_rt.worker.child import run_child  # and subprocess, for the first load only

    what = "checking and optimising it"
    run_child("edge_rt.worker.prepare", msgspec.json.encode(load).decode(), model=load.model, what=what)


def main(argv: Sequence[str] = sys.argv[1:], write: Callable[[bytes], object] = sys.stdout.buffer.write) -> int:
    """Run as the child."""
    from edge_rt.worker.main import isolate

    isolate()
    (load,) = argv
    try:
        load_tensor_session(msgspec.json.decode(load, type=Load)).close()
    except EdgeRtError as exc:
        write(msgspec.json.encode(exc.to_wire()))
        return 1
    return 0


if __name__ == "__main__":
    # What a library prints must not be taken for an answer.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.exit(main(write=answer.write))
