"""Make a GGUF file of a folder with an ONNX model, in a process of its own.

`python -m edge_rt.worker.convert FOLDER VOCAB DST` is that process: protobuf and numpy read what others made, and take
memory that the caller shall not keep. Its stdout holds an error of ours as one JSON line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge_rt.catalog.part import disk_full
from edge_rt.catalog.store import free_bytes
from edge_rt.errors import BackendLoadError, BackendUnavailableError, EdgeRtError, from_wire


def convert(folder: Path, vocab: Path, dst: Path) -> None:
    """Write folder's weights with vocab's tokenizer and hyperparameters to dst.

    Raises ModelFormatError naming what it cannot take, BackendUnavailableError without the extra `onnx`, and
    BackendLoadError with the child's last words. dst may then hold a part of the file.
    """
    child = subprocess.run(
        [sys.executable, "-m", "edge_rt.worker.convert", str(folder), str(vocab), str(dst)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if child.returncode == 0:
        return
    if child.stdout.strip():
        code, values = msgspec.json.decode(child.stdout.splitlines()[-1], type=tuple[str, dict[str, object]])
        raise from_wire(code, values)
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    last = [line.strip() for line in child.stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
    raise BackendLoadError(model=folder.name, reason=f"converting ended with {how}: {''.join(last) or 'no word'}")


def _convert(folder: Path, vocab: Path, dst: Path) -> None:
    try:
        from edge_rt.convert.folder import convert_folder
    except ImportError as exc:
        raise BackendUnavailableError(backend="onnx", reason=str(exc), extra="onnx") from exc
    with disk_full(dst.parent, 0, lambda: free_bytes(dst.parent)):
        convert_folder(folder, vocab, dst)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run as the child."""
    try:
        _convert(*(Path(name) for name in argv))
    except EdgeRtError as exc:
        sys.stdout.buffer.write(msgspec.json.encode(exc.to_wire()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
