"""A modelled board's files without a mount: what powerd's code takes where it would open the kernel's."""

from __future__ import annotations

from tests.plants.board import Board
from tests.plants.kernel import fail


class BoardFiles:
    """Reads and writes as edge_rt.devices.kernel_files.KernelFiles does. Raises OSError only."""

    def __init__(self, board: Board) -> None:
        self._board, self._tree = board, board.tree

    def read(self, path: str) -> str:
        path = self._tree.resolve(path)
        return self._tree.read(path, self._tree.opened(path, for_writing=False)).strip("\0 \t\r\n")

    def watch(self, path: str) -> str:
        return self.read(path)

    def write(self, path: str, text: str) -> None:
        path = self._tree.resolve(path)
        if self._tree.write(path, f"{text}\n", self._tree.opened(path, for_writing=True)) != len(text) + 1:
            fail("EIO")

    def names(self, folder: str) -> list[str]:
        return self._tree.children(self._tree.resolve(folder)) or fail("ENOENT")

    def exists(self, path: str) -> bool:
        path = self._tree.resolve(path)
        return path in self._tree.nodes or bool(self._tree.children(path))

    def forget(self, path: str) -> None: ...

    def close(self) -> None: ...
