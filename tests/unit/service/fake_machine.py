"""A machine in memory: files, and programs that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from edge_rt.service.system import Done

SYSTEMD_252 = "systemd 252 (252.38-1~deb12u1)\n+PAM +AUDIT\n"


class FakeMachine:
    """answers  by the command's beginning; what is not there ends with status 0 and says nothing"""

    def __init__(self, answers: Mapping[str, Done] | None = None, *, is_live: bool = True, has: bool = True) -> None:
        self.is_live = is_live
        self.files: dict[PurePosixPath, str] = {}
        self.ran: list[str] = []
        self._has = has
        self.answers: dict[str, Done] = {
            **(answers or {}),
            "systemctl --version": (answers or {}).get("systemctl --version", Done(status=0, out=SYSTEMD_252, err="")),
            "systemctl is-active": Done(status=3, out="inactive\n", err=""),
        }

    def read(self, path: PurePosixPath) -> str | None:
        return self.files.get(path)

    def exists(self, path: PurePosixPath) -> bool:
        return path in self.files

    def write(self, path: PurePosixPath, text: str) -> None:
        self.files[path] = text

    def remove(self, path: PurePosixPath) -> bool:
        return self.files.pop(path, None) is not None

    def run(self, *command: str) -> Done:
        if not self._has:
            raise FileNotFoundError(command[0])
        line = " ".join(command)
        self.ran.append(line)
        return next(
            (done for start, done in self.answers.items() if line.startswith(start)), Done(status=0, out="", err="")
        )
