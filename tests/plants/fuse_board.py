"""A modelled board's sys/ and proc/ below a mount point: a FUSE file system in a process of its own.

    with FuseBoard("pi_5", tmp_path / "root") as board:
        board.tell("load", busy=0.5)
        board.tell("add_fault", pattern="*/scaling_max_freq", on="write", errno_name="EBUSY")
        ...
        board.kill()  # every access gives ENOTCONN from here on

Needs /dev/fuse, libfuse and the right to mount; why_not() says what is missing. Ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.plants.board import Board
from tests.plants.closed_loop import Coupling, Phase
from tests.plants.kernel import Attribute, Link

_ROOT = Path(__file__).resolve().parent.parent.parent
_UNMOUNT_S = 2.0


def why_not() -> str:
    """Say what is missing to mount a board here; empty if nothing is."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "mounting takes root or fusermount3 (package fuse3)"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy or libfuse is missing ({error}): pip install mfusepy, apt-get install fuse3"
    return ""


class FuseBoard:
    """A board that is mounted while the `with` lasts. root holds its sys/ and proc/.

    is_stepped  its time passes only by tell("advance", span_s=…); otherwise it is the monotonic clock
    """

    def __init__(self, profile: str, root: Path, *, is_stepped: bool = False) -> None:
        self.root = root
        self._command = [sys.executable, "-m", "tests.plants.fuse_board", profile, str(root), str(int(is_stepped))]
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "mounted\n":
            self.__exit__(None, None, None)
            raise RuntimeError(f"the board's server ended with {self.process.returncode} instead of mounting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()  # the server unmounts and ends
        try:
            # A container that was started meanwhile has a copy of the mount, for which the server would go on.
            self.process.wait(_UNMOUNT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if _is_mounted(self.root):
            unmount(self.root)

    def tell(self, do: str, **values: Any) -> Any:
        """Have the server do something, of what Server.todo has; gives its answer. Raises ValueError."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        """End the server without a word, as when a bus or a driver dies."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def path(self, relative: str) -> Path:
        return self.root / relative

    def read(self, relative: str) -> str:
        """Read with os.open and os.pread, as the product does; stripped."""
        fd = os.open(self.root / relative, os.O_RDONLY)
        try:
            return os.pread(fd, 4096, 0).decode().strip()
        finally:
            os.close(fd)

    def write(self, relative: str, text: str) -> int:
        fd = os.open(self.root / relative, os.O_WRONLY)
        try:
            return os.write(fd, text.encode())
        finally:
            os.close(fd)


def unmount(root: Path) -> None:
    """Take a mount away, whoever still uses it and whether or not its server lives."""
    command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    subprocess.run([*command, str(root)], check=False, capture_output=True)


def _is_mounted(root: Path) -> bool:
    # Not os.path.ismount: it asks the file system, which may be dead.
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return any(line.split(" ")[4] == str(root) for line in lines)


# -- the server's process ---------------------------------------------------------------------------------------------


class SteppedClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, span_s: float) -> None:
        self.now_s += span_s


class Server:
    """What a test may tell the board's server, by name."""

    def __init__(self, board: Board, clock: Callable[[], float], lock: threading.Lock) -> None:
        self.board, self._clock, self.lock = board, clock, lock
        self.coupling: Coupling | None = None
        tree = board.tree
        self.todo: dict[str, Callable[..., Any]] = {
            "load": board.load,
            "recreate": board.recreate,
            "set_counter": board.set_counter,
            "set": board.set,
            "run_program": board.run_program,
            "state": board.state,
            "advance": self._advance,
            "add_fault": board.add_fault,
            "clear_faults": tree.faults.clear,
            "n_met": lambda: [fault.n_met for fault in tree.faults],
            "unplug": tree.unplug,
            "plug": tree.plug,
            "writes": lambda: list(tree.writes),
            "couple": self._couple,
            "phase": self._phase,
            "cycles": lambda: self.coupling.cycles if self.coupling else 0.0,
        }

    def answer(self, do: str, **values: Any) -> dict[str, Any]:
        try:
            if do == "uncouple":  # its thread takes the lock
                return {"value": self.uncouple()}
            with self.lock:
                return {"value": self.todo[do](**values)}
        except Exception as error:  # noqa: BLE001 - whatever a test gets wrong it is told, and the board lives on
            return {"error": f"{type(error).__name__}: {error}"}

    def uncouple(self) -> int:
        """Give how often the coupling looked."""
        coupling, self.coupling = self.coupling, None
        if coupling is None:
            return 0
        coupling.close()
        return coupling.n_looks

    def _advance(self, span_s: float) -> None:
        assert isinstance(self._clock, SteppedClock), "this board's time is real"
        self._clock.advance(span_s)
        self.board.state()

    def _couple(self, pids: list[int], n_cpus: int) -> str:
        self.coupling = Coupling(self.board, self.lock, pids, n_cpus)
        return self.coupling.quota.kind

    def _phase(self, phase: Phase) -> None:
        assert self.coupling is not None
        self.coupling.phase = phase


def serve(profile: str, root: Path, *, is_stepped: bool) -> None:
    """Mount and serve until the standard input ends."""
    import mfusepy
    from mfusepy import FUSE, FuseOSError, Operations

    with contextlib.suppress(OSError):
        os.nice(-15)  # a board does not wait for its turn behind what runs on it
    clock: Callable[[], float] = SteppedClock() if is_stepped else time.monotonic
    board = Board(profile, clock)
    tree, lock = board.tree, threading.Lock()
    server = Server(board, clock, lock)
    started_ns = time.time_ns()
    uid, gid = os.geteuid(), os.getegid()

    def control() -> None:
        for line in sys.stdin:
            print(json.dumps(server.answer(**json.loads(line))), flush=True)
        server.answer("uncouple")
        unmount(root)

    class Files(Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self) -> None:
            self._handles: dict[int, tuple[Attribute, list[str]]] = {}
            self._last = 0

        def init(self, path: str) -> None:
            print("mounted", flush=True)
            threading.Thread(target=control, daemon=True).start()

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            with lock:
                node = _told(FuseOSError, tree.find, path.lstrip("/"))
            if isinstance(node, Attribute):
                mode, size = stat.S_IFREG | node.mode, node.size
                owner = (node.uid or uid, node.gid or gid)
            else:
                mode, size = (stat.S_IFLNK | 0o777 if isinstance(node, Link) else stat.S_IFDIR | 0o755), 0
                owner = (uid, gid)
            times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), started_ns)
            return {"st_mode": mode, "st_size": size, "st_nlink": 1, "st_uid": owner[0], "st_gid": owner[1], **times}

        def readdir(self, path: str, fh: int) -> list[str]:
            with lock:
                return [".", "..", *tree.children(path.strip("/"))]

        def readlink(self, path: str) -> str:
            with lock:
                node = _told(FuseOSError, tree.find, path.lstrip("/"))
            if not isinstance(node, Link):
                raise FuseOSError(errno.EINVAL)
            # As the kernel writes them, a link ends in its target's name: "../../../1-0040", not "../..".
            folder, _, name = node.target.rpartition("/")
            return f"{os.path.relpath('/' + folder, os.path.dirname(path))}/{name}"  # noqa: PTH120

        def open(self, path: str, flags: int) -> int:
            for_writing = flags & os.O_ACCMODE != os.O_RDONLY
            with lock:
                node = _told(FuseOSError, tree.opened, path.lstrip("/"), for_writing=for_writing)
                self._last += 1
                self._handles[self._last] = (node, [""])
                return self._last

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            relative = path.lstrip("/")
            time.sleep(tree.delay_s(relative, "read"))
            with lock:
                node, held = self._handles[fh]
                # The text is made when reading begins; what follows is of the same text.
                if offset == 0 or not held[0]:
                    held[0] = _told(FuseOSError, tree.read, relative, node)
                return held[0].encode("utf-8", "surrogateescape")[offset : offset + size]

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            relative = path.lstrip("/")
            time.sleep(tree.delay_s(relative, "write"))
            with lock:
                text = data.decode("latin-1")
                return _told(FuseOSError, tree.write, relative, text, self._handles[fh][0])

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            with lock:
                _told(FuseOSError, tree.opened, path.lstrip("/"), for_writing=True)
            return 0

        def release(self, path: str, fh: int) -> int:
            with lock:
                self._handles.pop(fh, None)
            return 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            raise FuseOSError(errno.EACCES)

        def chmod(self, path: str, mode: int) -> int:
            with lock:
                node = _told(FuseOSError, tree.opened, path.lstrip("/"), for_writing=False)
                node.mode = stat.S_IMODE(mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            with lock:
                node = _told(FuseOSError, tree.opened, path.lstrip("/"), for_writing=False)
                node.uid, node.gid = (max(0, uid), max(0, gid))
            return 0

    # Left to itself, libfuse 3.12 and later complains of its own default.
    version = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor)
    threads = {"max_idle_threads": 8} if version >= (3, 12) else {}
    FUSE(
        Files(),
        str(root),
        foreground=True,
        nothreads=False,
        allow_other=os.geteuid() == 0,
        default_permissions=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="edge_rt-board",
        **threads,
    )


def _told(kind: Callable[[int], Exception], call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call, and turn an OSError into the FUSE library's own."""
    try:
        return call(*values, **named)
    except OSError as error:
        raise kind(error.errno or errno.EIO) from error


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), is_stepped=sys.argv[3] == "1")
