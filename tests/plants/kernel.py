"""Files with the kernel's semantics: attributes that are made when read and judged when written, and faults in them.

Nothing here mounts anything: `Tree` is what a FUSE server, or a test, reads and writes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NoReturn

Operation = Literal["read", "write", "open"]
PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Attribute:
    """One file. show makes its text; store takes what was written, and is None for what is read-only."""

    show: Callable[[], str]
    store: Callable[[str], None] | None = None
    mode: int = 0o444
    size: int = PAGE_BYTES
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    target: str  # from the tree's top, without a leading slash


Node = Attribute | Link


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong with the files that match a glob, the next n_left times (-1: always).

    errno_name  the call fails
    text        what is read instead
    delay_s     the answer comes late
    is_frozen   the text read first is read again for ever
    late_s      a write succeeds and comes into force so much later, as cpufreq's limits do
    is_ignored  writes succeed and change nothing, as under a firmware's lock
    max_bytes   a write takes only so many
    revert_to   some other program writes this, revert_s after each write
    """

    pattern: str
    on: Operation = "read"
    errno_name: str = ""
    text: str | None = None
    delay_s: float = 0.0
    is_frozen: bool = False
    late_s: float = 0.0
    is_ignored: bool = False
    max_bytes: int = 0
    revert_to: str | None = None
    revert_s: float = 0.0
    n_left: int = -1
    n_met: int = 0
    seen: dict[str, str] = field(default_factory=dict)


def fail(name: str) -> NoReturn:
    """Raise OSError by an errno's name."""
    number: int = getattr(errno, name)
    raise OSError(number, os.strerror(number))


def kstrtoul(text: str) -> int:
    """Read an unsigned number as the kernel's kstrtoul(text, 0, …) does. Raises EINVAL, ERANGE."""
    digits = text.removesuffix("\n").removeprefix("+")
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[:1] == "0" and len(digits) > 1 else 10
    try:
        # int() takes blanks and underscores, the kernel takes neither.
        value = int(digits, base) if digits.isalnum() and digits.isascii() else -1
    except ValueError:
        value = -1
    if value < 0:
        fail("EINVAL")
    if value >= 1 << 64:
        fail("ERANGE")
    return value


def scan_word(text: str) -> str:
    """Read as sscanf("%15s") does: the first word, at most 15 characters. Raises EINVAL."""
    words = text.split(maxsplit=1)
    return words[0][:15] if words else fail("EINVAL")


def scan_number(text: str, n_bits: int = 32) -> int:
    """Read as sscanf("%u") does, or "%lu" with 64 bits: blanks, then digits, then anything. Raises EINVAL."""
    digits = ""
    for char in text.lstrip():
        if not ("0" <= char <= "9"):
            break
        digits += char
    return int(digits) & ((1 << n_bits) - 1) if digits else fail("EINVAL")


class Tree:
    """A file tree: nodes by path, the faults in force, and a log of what was written.

    tick  is called before each access, to bring the board up to now
    """

    def __init__(self, tick: Callable[[], float]) -> None:
        self.nodes: dict[str, Node] = {}
        self.faults: list[Fault] = []
        self.writes: list[tuple[float, str, str, str]] = []  # when, path, text, errno's name or ""
        self._tick = tick
        self._unplugged: dict[str, dict[str, Node]] = {}
        self._later: list[tuple[float, str, str]] = []
        self._late: dict[str, tuple[float, str]] = {}  # writes by path that are not in force yet

    def add(self, nodes: dict[str, Node]) -> None:
        self.nodes.update(nodes)

    def unplug(self, top: str) -> None:
        """Take away a file or directory, and every link to or into it."""
        gone = {path: node for path, node in self.nodes.items() if _is_below(path, top)}
        gone |= {
            path: node for path, node in self.nodes.items() if isinstance(node, Link) and _is_below(node.target, top)
        }
        if not gone:
            raise KeyError(top)
        for path in gone:
            del self.nodes[path]
        self._unplugged[top] = gone

    def plug(self, top: str, *, as_top: str = "") -> None:
        """Bring back what was unplugged, under another name if given: hwmon devices get new numbers."""
        for path, node in self._unplugged.pop(top).items():
            new_path, new_node = path, node
            if as_top and _is_below(path, top):
                new_path = as_top + path.removeprefix(top)
            elif as_top:
                name, new_name = top.rpartition("/")[2], as_top.rpartition("/")[2]
                new_path = path.removesuffix(name) + new_name if path.endswith(name) else path
            if isinstance(node, Link) and as_top and _is_below(node.target, top):
                new_node = Link(as_top + node.target.removeprefix(top))
            # A new object each time: who holds the old file open must get ENODEV, not the new device.
            self.nodes[new_path] = _again(new_node)

    def find(self, path: str) -> Node | None:
        """Give a file or link; None for a directory. Raises ENOENT."""
        node = self.nodes.get(path)
        if node is None and path and not self.children(path):
            fail("ENOENT")
        return node

    def children(self, path: str) -> list[str]:
        top = f"{path}/" if path else ""
        return sorted({each[len(top) :].partition("/")[0] for each in self.nodes if each.startswith(top)})

    def resolve(self, path: str) -> str:
        """Follow the links in a path, as the kernel does for one that is opened. Raises ENOENT, ELOOP."""
        for _ in range(40):
            parts = path.split("/")
            for n in range(1, len(parts) + 1):
                node = self.nodes.get("/".join(parts[:n]))
                if isinstance(node, Link):
                    path = "/".join([node.target, *parts[n:]])
                    break
            else:
                return path
        fail("ELOOP")

    def delay_s(self, path: str, on: Operation) -> float:
        """Tell how long an access has to wait, before it is made."""
        return max((fault.delay_s for fault in self._matching(path, on)), default=0.0)

    def opened(self, path: str, *, for_writing: bool) -> Attribute:
        """Open. Raises ENOENT; EACCES for a read-only attribute, to root too; what a fault says."""
        self._advance()
        node = self.find(path)
        if not isinstance(node, Attribute):
            fail("EISDIR")
        self._meet(path, "open")
        if for_writing and node.store is None:
            fail("EACCES")
        return node

    def read(self, path: str, opened: Attribute | None = None) -> str:
        """Read the whole file. Raises ENODEV where what was opened is gone, and what a fault says."""
        self._advance()
        node = self._live(path, opened)
        faults = self._meet(path, "read")
        text = node.show()
        for fault in faults:
            if fault.text is not None:
                text = fault.text
            if fault.is_frozen:
                text = fault.seen.setdefault(path, text)
        return text

    def write(self, path: str, text: str, opened: Attribute | None = None) -> int:
        """Write; gives how many bytes were taken. Raises as the attribute's store, ENODEV, and what a fault says."""
        now_s = self._advance()
        try:
            node = self._live(path, opened)
            if node.store is None:
                fail("EACCES")
            faults = self._meet(path, "write")
            n_bytes = min([len(text), *(fault.max_bytes for fault in faults if fault.max_bytes)])
            late_s = max((fault.late_s for fault in faults), default=0.0)
            # What was asked for last holds, and comes into force when the first one that is on its way would have.
            due_s, _ = self._late.pop(path, (now_s + late_s, ""))
            if late_s:
                self._late[path] = (min(due_s, now_s + late_s), text[:n_bytes])
            elif not any(fault.is_ignored for fault in faults):
                node.store(text[:n_bytes])
        except OSError as error:
            self.writes.append((now_s, path, text, errno.errorcode[error.errno or 0]))
            raise
        self.writes.append((now_s, path, text, ""))
        for fault in faults:
            if fault.revert_to is not None:
                self._later.append((now_s + fault.revert_s, path, fault.revert_to))
        return n_bytes

    def _advance(self) -> float:
        now_s = self._tick()
        due = [each for each in self._later if each[0] <= now_s]
        self._later = [each for each in self._later if each[0] > now_s]
        due += [(at_s, path, text) for path, (at_s, text) in self._late.items() if at_s <= now_s]
        self._late = {path: (at_s, text) for path, (at_s, text) in self._late.items() if at_s > now_s}
        for _, path, text in sorted(due):
            node = self.nodes.get(path)
            if isinstance(node, Attribute) and node.store is not None:
                node.store(text)
        return now_s

    def _live(self, path: str, opened: Attribute | None) -> Attribute:
        node = self.nodes.get(path)
        if not isinstance(node, Attribute) or (opened is not None and node is not opened):
            fail("ENODEV" if opened is not None else "ENOENT")
        return node

    def _matching(self, path: str, on: Operation) -> list[Fault]:
        return [fault for fault in self.faults if fault.n_left and fault.on == on and fnmatchcase(path, fault.pattern)]

    def _meet(self, path: str, on: Operation) -> list[Fault]:
        found = self._matching(path, on)
        for fault in found:
            fault.n_met += 1
            fault.n_left -= fault.n_left > 0
        for fault in found:
            if fault.errno_name:
                fail(fault.errno_name)
        return found


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _again(node: Node) -> Node:
    if isinstance(node, Link):
        return node
    return Attribute(node.show, node.store, node.mode, node.size, node.uid, node.gid)
