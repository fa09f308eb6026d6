"""Make a GGUF file of a folder with an ONNX model, in a process of its own.

`python -m edge_rt.worker.convert FOLDER VOCAB DST` is that process: protobuf and numpy read what others made, and take
memory that the caller shall not keep. Its stdout holds an error of ours as one JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edge_rt.catalog.part import disk_full
from edge_rt.catalog.store import free_bytes
from edge_rt.errors import BackendUnavailableError
from edge_rt.same_package import end_with_parent
from edge_rt.worker.child import answer_parent, run_child


def convert(folder: Path, vocab: Path, dst: Path) -> None:
    """Write folder's weights with vocab's tokenizer and hyperparameters to dst.

    Raises ModelFormatError naming what it cannot take, BackendUnavailableError without the extra `onnx`, and
    BackendLoadError with the child's last words. dst may then hold a part of the file.
    """
    run_child("edge_rt.worker.convert", str(folder), str(vocab), str(dst), model=folder.name, what="converting")


def _convert(folder: Path, vocab: Path, dst: Path) -> None:
    try:
        from edge_rt.convert.folder import convert_folder
    except ImportError as exc:
        raise BackendUnavailableError(backend="onnx", reason=str(exc), extra="onnx") from exc
    with disk_full(dst.parent, 0, lambda: free_bytes(dst.parent)):
        convert_folder(folder, vocab, dst)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run as the child."""
    return answer_parent(lambda: _convert(*map(Path, argv)))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
