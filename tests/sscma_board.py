"""A stub of a board with SSCMA firmware on a pseudo terminal: it says what the protocol's own page shows.

Nothing here computes: what a test sees of it says nothing of a real board.
"""

from __future__ import annotations

import base64
import json
import os
import pty
import select
import threading
import tty
from collections.abc import Callable
from typing import Any

from edge_rt.devices.sscma_wire import crc16_maxim

BOOT = b"\r\nBL2: boot from MX25L25645G\r\n{hal} init\nxip {enabled}\r\n"
MODELS = [
    {"id": 2, "type": 3, "address": 5242880, "size": 267024},
    {"id": 5, "type": 3, "address": 4194304, "size": 267024},
]
CAMERA = {"id": 1, "type": 1, "state": 1}
JPEG = b"\xff\xd8\xff\xe0 a picture \xff\xd9"
LABELS = ["person", "forklift"]
CARD = base64.b64encode(json.dumps({"name": "people", "classes": LABELS}).encode()).decode()
BOX = [87, 83, 77, 65, 70, 0]


def frame(kind: int, name: str, data: Any, code: int = 0) -> bytes:
    """One line as the firmware writes it."""
    body = json.dumps({"type": kind, "name": name, "code": code, "data": data})
    return b"\r" + body.encode() + b"\n"


def stored(text: str) -> dict[str, Any]:
    return {"crc16_maxim": crc16_maxim(text.encode()), "info": text}


class Firmware:
    """Answers requests, one line each; no line is open."""

    def __init__(self) -> None:
        self.model = MODELS[0]
        self.info: dict[str, Any] = stored(CARD)
        self.requests: list[str] = []
        self.result: dict[str, Any] = {"boxes": [BOX], "resolution": [240, 240]}

    def answer(self, line: str) -> bytes:
        self.requests.append(line)
        if not line.startswith("AT+"):
            return frame(2, "AT", f"Unknown command: {line}", 5)
        command = line[3:]
        name, _, text = command.partition("=")
        arguments = text.split(",") if text else []
        bare = name.partition("@")[2] or name
        asked: dict[str, Any] = {
            "ID?": "7e2d02cf",
            "NAME?": "Grove Vision AI (WE2)",
            "STAT?": {"boot_count": 1631, "is_ready": 1},
            "VER?": {"at_api": "v0", "software": "2023.10.10", "hardware": "1"},
            "MODELS?": MODELS,
            "MODEL?": self.model,
            "SENSORS?": [CAMERA],
            "INFO?": self.info,
            "INVOKE?": 0,
        }
        if bare in asked:
            return frame(0, name, asked[bare])
        if bare == "BREAK":
            return frame(0, name, 1530898)
        if bare == "MODEL":
            self.model = next(model for model in MODELS if model["id"] == int(arguments[0]))
            return frame(0, name, {"model": self.model})
        if bare == "INVOKE":
            return self._invoke(name, *map(int, arguments))
        return frame(2, "AT", f"Unknown command: {command}", 5)

    def _invoke(self, name: str, n: int, _only_changes: int, result_only: int) -> bytes:
        said = frame(0, name, {"model": self.model, "sensor": CAMERA})
        picture = {} if result_only else {"image": base64.b64encode(JPEG).decode()}
        for count in range(3 if n < 0 else n):
            said += frame(1, name, {"count": count, "perf": [8, 365, 1], **self.result, **picture})
        return said


class Board:
    """The firmware behind a pseudo terminal; path is what pyserial opens."""

    def __init__(self, firmware: Firmware, spoil: Callable[[bytes], bytes] = lambda said: said) -> None:
        self.firmware = firmware
        self._device, port = pty.openpty()
        tty.setraw(port)
        self.path = os.ttyname(port)
        self._port: int | None = port  # held open: closing the last end tells the board of a hang-up
        self._spoil = spoil
        self._leave, self._left = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def unplug(self) -> None:
        """Take it away; whoever has the port open loses it."""
        if self._port is not None:
            os.write(self._left, b"x")
            self._thread.join()
            for each in (self._device, self._port, self._leave, self._left):
                os.close(each)
            self._port = None

    def _run(self) -> None:
        os.write(self._device, BOOT)
        buffer = b""
        while True:
            ready, _, _ = select.select([self._device, self._leave], [], [])
            if self._leave in ready:
                return
            buffer += os.read(self._device, 4096)
            *lines, buffer = buffer.split(b"\r")
            for line in lines:
                os.write(self._device, self._spoil(self.firmware.answer(line.decode())))
