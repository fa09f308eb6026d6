"""What is there when a model starts: pinned prefixes, and those that were often used, from one run to the next."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.engine.prefix_disk import OnDisk, PrefixDisk, PrefixFile
from edge_rt.engine.prefix_nodes import Kept, Node, path_to
from edge_rt.engine.prefix_tree import PrefixTree
from edge_rt.errors import EdgeRtError
from edge_rt.types import Chunk, GenerateRequest, PinnedPrefix

_log = logging.getLogger(__name__)

MAX_PINS = 64  # of each owner
_MAX_PIN_SHARE = 0.25  # of what may be kept, for the pins of one user
_MIN_KEPT_TOKENS = 32  # shorter ones are computed with each prompt
_MAX_TRIES = 3
_MIN_SAVED_TOKENS = 64  # on disk: fewer are computed again in no time


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that stays.

    tenant       who pinned it, "" the configuration
    end          where it ends in the tree, which holds all of it; is_asked: somebody computes it
    n_computed   how often somebody has
    is_hopeless  it cannot be written to the disk
    problem      why it is not kept or not written, "" if it is or will be
    """

    name: str
    owner: str
    token_ids: tuple[int, ...]
    tenant: str = ""
    end: Node | None = None
    is_asked: bool = False
    n_computed: int = 0
    is_hopeless: bool = False
    problem: str = ""

    @property
    def is_kept(self) -> bool:
        return self.end is not None and self.end.is_there

    def fails(self, problem: str) -> None:
        """Note what is wrong, and tell it once."""
        if problem and not self.problem:
            _log.warning("pin %s: %s", self.name, problem)
        self.problem = problem

    # The sink of the request that computes it, whose answer is nothing.

    def chunk(self, chunk: Chunk) -> None:
        self.n_computed += chunk.finish_reason is not None

    def failed(self, error: EdgeRtError) -> None:
        self.fails(f"it cannot be computed: {error}")


class WarmStart:
    """Pins and the disk of one tree; the engine's thread alone calls it.

    disk  None: nothing outlasts the process
    """

    def __init__(self, tree: PrefixTree, disk: PrefixDisk | None) -> None:
        self._tree = tree
        self._disk = disk if disk is not None and disk.open() else None
        self._pins: dict[tuple[str, str], Pin] = {}
        self.left_out: dict[str, str] = {}  # names of the configuration's pins that make no prefix, and why
        self._to_read: deque[PrefixFile] = deque()  # into memory, before anybody asks
        self.is_due = False  # since something was computed, nothing has been written
        if self._disk is not None:
            for file in list(self._disk.files):
                self._take_up(file, self._disk)
            self._disk.before_remove = self._rescue
            # The newest first, but pinned ones before them.
            self._to_read.extendleft(sorted(self._disk.files, key=lambda file: file.head.pin != ""))

    def stats(self) -> dict[str, Any]:
        """Give the fields of EngineStats that tell of them."""
        return {
            "prefix_disk_bytes": self._disk.n_bytes if self._disk is not None else 0,
            "pinned_prefixes": sum(pin.is_kept for pin in self._pins.values()),
            "pins_with_problem": sum(bool(pin.problem) for pin in self._pins.values()) + len(self.left_out),
        }

    def pins(self, owners: frozenset[str]) -> list[PinnedPrefix]:
        """Describe the pins of some owners."""
        on_disk = self._pinned_on_disk()
        return [
            PinnedPrefix(
                name=pin.name,
                n_tokens=len(pin.token_ids),
                is_kept=pin.is_kept,
                is_on_disk=key in on_disk,
                problem=pin.problem,
            )
            for key, pin in self._pins.items()
            if pin.owner in owners
        ] + [PinnedPrefix(name=name, n_tokens=0, problem=problem) for name, problem in self.left_out.items()]

    def pin(self, name: str, owner: str, token_ids: list[int], *, tenant: str = "") -> str:
        """Let a prefix stay from when it is computed, and another one of that name no longer; give why not, or "".

        tenant  who asks for it, whose pins may take a part of what may be kept; "" the configuration, which may all
        """
        key = (owner, name)
        if (old := self._pins.get(key)) is not None and old.token_ids == tuple(token_ids):
            return ""
        if old is None and sum(pin.owner == owner for pin in self._pins.values()) >= MAX_PINS:
            return f"{MAX_PINS} prefixes are pinned already; unpin one"
        if problem := self._beyond_share(key, tenant, len(token_ids)):
            return problem
        if old is not None:
            self.unpin(name, owner)
        self._pins[key] = Pin(name, owner, tuple(token_ids), tenant)
        self._settle(self._pins[key])
        return ""

    def _beyond_share(self, key: tuple[str, str], tenant: str, n_tokens: int) -> str:
        if not tenant:
            return ""
        n_own = sum(len(pin.token_ids) for other, pin in self._pins.items() if pin.tenant == tenant and other != key)
        need_mib, have_mib = (self._tree.bytes_of(n) / 2**20 for n in (n_tokens, n_own))
        share_mib = _MAX_PIN_SHARE * self._tree.limit_bytes() / 2**20
        if have_mib + need_mib <= share_mib:
            return ""
        return (
            f"it takes {need_mib:.1f} MiB beside {have_mib:.1f} MiB of your other pins, and the pins of one user may "
            f"take {share_mib:.1f} MiB; unpin one, or raise engine.max_prefix_bytes"
        )

    def unpin(self, name: str, owner: str) -> bool:
        """Let a pinned prefix go when its turn comes; False if there is none of that name."""
        pin = self._pins.pop((owner, name), None)
        if pin is None:
            return False
        if pin.end is not None:
            self._tree.unpin(pin.end)
        if self._disk is not None:
            for file in self._pinned_on_disk().get((owner, name), []):
                self._disk.remove(file)
        return True

    def request(self) -> tuple[GenerateRequest, Pin] | None:
        """Give a request without an answer, that computes a pinned prefix which is not there, and its sink.

        To be called when all that was computed is kept as far as there is room.
        """
        is_full = self._tree.n_bytes > self._tree.limit_bytes()  # with nothing left that could leave
        for pin in self._pins.values():
            self._settle(pin)
            if pin.is_kept and not pin.is_hopeless:
                pin.fails(self._beyond_limit(pin) if is_full else "")
            if pin.is_kept or len(pin.token_ids) < _MIN_KEPT_TOKENS:
                continue
            if pin.n_computed and pin.is_asked:  # it was, and is not kept
                problem = self._without_room(pin)
                if problem or pin.n_computed < _MAX_TRIES:
                    pin.fails(problem)
                    pin.is_asked = bool(problem)
            if not pin.is_asked:
                pin.is_asked = True
                request = GenerateRequest(
                    id=f"pin {pin.name}",
                    model="",
                    prompt_token_ids=pin.token_ids,
                    max_tokens=0,
                    tenant=pin.owner.removeprefix("\1"),
                    priority="background",
                    stream=False,
                )
                return request, pin
        return None

    @property
    def awaits_room(self) -> bool:
        """Say whether a pin has been computed that is to be kept now, also where others must leave for it."""
        return any(pin.n_computed and not pin.is_kept and not pin.problem for pin in self._pins.values())

    def _held_bytes(self) -> int:
        """Count what pins take in memory."""
        ends = [each.end for each in self._pins.values() if each.end is not None]
        pinned = {id(node): node for end in ends for node in path_to(end)}.values()
        return sum(node.kept.n_bytes for node in pinned if node.kept is not None)

    def _beyond_limit(self, pin: Pin) -> str:
        """Say what is wrong with a pin that has no file to leave memory for, where less memory is left than it was."""
        assert pin.end is not None
        if not any(node.kept is not None and node.kept.n_bytes for node in path_to(pin.end)):
            return ""
        return (
            f"it stays in memory, where pins take {self._held_bytes() / 2**20:.1f} MiB by now and only "
            f"{self._tree.limit_bytes() / 2**20:.1f} MiB may be kept; raise engine.max_prefix_bytes, or unpin one"
        )

    def _without_room(self, pin: Pin) -> str:
        """Say why a pin that is computed is not kept, "" where it could be by now."""
        need_bytes = self._tree.bytes_of(len(pin.token_ids))
        held_bytes = self._held_bytes()
        limit_bytes = self._tree.limit_bytes()
        if held_bytes + need_bytes <= limit_bytes and pin.n_computed < _MAX_TRIES:
            return ""
        return (
            f"it takes {need_bytes / 2**20:.1f} MiB beside {held_bytes / 2**20:.1f} MiB of other pins, and "
            f"{limit_bytes / 2**20:.1f} MiB may be kept; raise engine.max_prefix_bytes, or unpin others"
        )

    def settle(self) -> None:
        """Hold on to what has been computed for pins by now."""
        for pin in self._pins.values():
            self._settle(pin)

    def read_ahead(self, go_on: Callable[[], bool]) -> None:
        """Read what a start found on the disk into memory, while go_on and there is room: one state at a time."""
        while self._to_read:
            file = self._to_read[0]
            for node in self._path(file.head.owner, file.token_ids):
                if not isinstance(node.kept, OnDisk):
                    continue
                if not go_on() or not self._tree.has_room(node.kept.size_bytes):
                    return
                if (state := node.kept.read()) is None:
                    self._tree.drop(node)
                    break
                if not self._tree.hold(node, state, node.kept):
                    return
                self._tree.n_restored += node.n_tokens if len(file.head.sizes) > 1 else file.head.n_tokens
            self._to_read.popleft()

    def save(self, go_on: Callable[[], bool]) -> None:
        """Write what is worth it to the disk, while go_on."""
        self.settle()
        for owner, nodes, name in self._unsaved():
            if not go_on():
                return
            self._write(owner, nodes, name, go_on)
        self.is_due = not go_on()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    # The disk.

    def _pinned_on_disk(self) -> dict[tuple[str, str], list[PrefixFile]]:
        """Give the files of pins by owner and name, of which one that could not be unlinked may have left another.

        Forgets the files that were found damaged.
        """
        found: defaultdict[tuple[str, str], list[PrefixFile]] = defaultdict(list)
        if self._disk is not None:
            for file in [f for f in self._disk.files if f.is_gone]:
                self._disk.remove(file)
            for file in self._disk.files:
                if file.head.pin:
                    found[file.head.owner, file.head.pin].append(file)
        return found

    def _take_up(self, file: PrefixFile, disk: PrefixDisk) -> None:
        """Put a file's prefix into the tree; its states are read when they are wanted."""
        head = file.head
        if self._tree.n_states(len(file.token_ids)) != len(head.sizes):  # cut into other blocks
            disk.remove(file)
            return

        def save(start: int, _end: int | None) -> Kept:
            return OnDisk(file, start // self._tree.n_block)

        self._tree.put(head.owner, file.token_ids, save)
        for node in self._path(head.owner, file.token_ids):
            node.is_written = True
        if head.pin:
            pin = self._pins[head.owner, head.pin] = Pin(head.pin, head.owner, file.token_ids, head.pinned_by)
            self._settle(pin)

    def _unsaved(self) -> list[tuple[str, tuple[Node, ...], str]]:
        """List what is not on disk yet: owner, nodes in order, and the name of a pin."""
        if self._disk is None:
            return []
        found: list[tuple[str, tuple[Node, ...], str]] = []
        seen: set[int] = set()
        on_disk = self._pinned_on_disk()
        for key, pin in self._pins.items():
            nodes = self._path(pin.owner, pin.token_ids) if pin.is_kept else ()
            if nodes and key not in on_disk and not pin.is_hopeless:
                found.append((pin.owner, nodes, pin.name))
                seen.update(map(id, nodes))
        for owner, _, end in self._tree.ends():
            nodes = path_to(end)
            n_hot = max((i for i, node in enumerate(nodes, 1) if node.n_hits), default=0)
            nodes = self._tree.savable(nodes, n_hot)
            if not nodes or nodes[-1].is_written or id(nodes[-1]) in seen:
                continue
            if sum(node.n_tokens for node in nodes) >= _MIN_SAVED_TOKENS:
                seen.add(id(nodes[-1]))
                found.append((owner, nodes, ""))
        return found

    def _write(self, owner: str, nodes: tuple[Node, ...], name: str, go_on: Callable[[], bool]) -> None:
        assert self._disk is not None
        states: list[NDArray[np.uint8]] = []
        kept = [node for node in nodes if node.kept is not None]
        for node in kept:
            assert node.kept is not None
            if (state := node.kept.read()) is None:
                self._tree.drop(node)
                return
            states.append(state)
        token_ids = [token_id for node in nodes for token_id in node.ids()]
        pin = self._pins[owner, name] if name else None
        pinned_by = pin.tenant if pin is not None else ""
        file = self._disk.save(owner, token_ids, states, pin=name, pinned_by=pinned_by, go_on=go_on)
        if file is None and not go_on():
            return
        if file is not None:
            for number, node in enumerate(kept):
                self._tree.has_file(node, OnDisk(file, number))
        for node in nodes:  # what cannot be written is not tried again and again
            node.is_written = True
        if pin is not None and file is None:
            pin.is_hopeless = True
            pin.fails(self._disk.problem)

    def _rescue(self, file: PrefixFile) -> None:
        """Read what only a file has, which is about to be removed: others may go on from it, and it has its turn."""
        for node in self._path(file.head.owner, file.token_ids):
            node.is_written = False
            if isinstance(node.kept, OnDisk) and node.kept.file is file:
                if (state := node.kept.read()) is None:
                    self._tree.drop(node)
                    break
                self._tree.rescue(node, state)
        self._tree.shrink()

    def _path(self, owner: str, token_ids: tuple[int, ...]) -> tuple[Node, ...]:
        match = self._tree.find(owner, token_ids)
        return path_to(match.nodes[-1]) if match.nodes and match.n_tokens == len(token_ids) else ()

    def _settle(self, pin: Pin) -> None:
        if pin.end is not None and not pin.end.is_there:  # it could not be restored: it is computed again
            self._tree.unpin(pin.end)
            pin.end, pin.is_asked, pin.n_computed = None, False, 0
        if pin.end is None and (end := self._tree.pin(pin.owner, pin.token_ids)) is not None:
            pin.end, pin.problem = end, ""
