"""What a tree of kept prefixes is made of: blocks of tokens, and the states at them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.engine.prefix import common_prefix

TOKEN_BYTES = 4


class Kept(Protocol):
    """A saved state, in memory or on disk; is_there: it can be read, as far as is known."""

    @property
    def is_there(self) -> bool: ...

    @property
    def n_bytes(self) -> int:
        """Count the bytes of memory that it takes."""
        ...

    def read(self) -> NDArray[np.uint8] | None:
        """Give the state; None where it cannot be had any more."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """A state in memory.

    on_disk  a file that has it too: letting it go, when memory is wanted, costs another look into the file
    """

    state: NDArray[np.uint8]
    on_disk: Kept | None = None
    is_there: ClassVar[bool] = True

    @property
    def n_bytes(self) -> int:
        return self.state.nbytes

    def read(self) -> NDArray[np.uint8]:
        return self.state


@dataclass(slots=True, eq=False)
class Account:
    """What one user's prompts take in a tree. ends: a heap of their ends by worth; some are out of date."""

    n_bytes: int = 0
    ends: list[tuple[tuple[int, int], int, Node]] = field(default_factory=list)
    max_ends: int = 256


@dataclass(slots=True, eq=False)
class Node:
    """A block of tokens behind its parent's. kept is None between the ends where whole sequences are saved.

    account  of whose prompts it is; n_hits: how often a prompt went through it
    worth    as prefix_eviction has it, and when it was used: what has least leaves first
    n_pins  how many pinned prefixes go through it
    is_written  it is on the disk, or cannot be
    """

    key: bytes
    parent: Node | None
    account: Account
    kept: Kept | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)  # the children's keys, sorted
    worth: tuple[int, int] = (0, 0)
    n_hits: int = 0
    n_pins: int = 0
    is_written: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def is_there(self) -> bool:
        """Say whether it is in the tree still."""
        return self.parent is not None and self.parent.children.get(self.key) is self

    def ids(self) -> list[int]:
        return array("i", self.key).tolist()

    def whole_ids(self) -> list[int]:
        """Give the tokens from the tree's root to this node's end."""
        keys = [node.key for node in up_from(self)]
        return array("i", b"".join(reversed(keys))).tolist()

    def nearest(self, key: bytes) -> tuple[Node | None, int]:
        """Find the child that begins most like key, and how many tokens they share.

        In sorted order it stands beside the place where key would be.
        """
        best, n_best = None, 0
        at = bisect_left(self.order, key)
        for other in self.order[max(0, at - 1) : at + 1]:
            if (n := common_tokens(other, key)) > n_best:
                best, n_best = self.children[other], n
        return best, n_best

    def add(self, key: bytes, kept: Kept | None) -> Node:
        node = self.children[key] = Node(key, self, self.account, kept)
        self.order.insert(bisect_left(self.order, key), key)
        return node

    def remove(self) -> None:
        assert self.parent is not None
        del self.parent.children[self.key]
        del self.parent.order[bisect_left(self.parent.order, self.key)]


@dataclass(frozen=True, slots=True)
class Match:
    """What is kept of a prompt: its first n_tokens, by restoring nodes in order and cutting what is more."""

    n_tokens: int
    nodes: tuple[Node, ...] = ()


def packed(token_ids: Sequence[int]) -> bytes:
    """Write token ids as bytes, whose order and equality are those of the ids' bytes."""
    return array("i", token_ids).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Count the leading tokens that two packed lists share."""
    return common_prefix(a, b) // TOKEN_BYTES


def path_to(node: Node) -> tuple[Node, ...]:
    """Give the nodes from the root, without it, to a node."""
    return tuple(up_from(node))[::-1]


def up_from(node: Node) -> Iterator[Node]:
    """Go from a node to the root, without it."""
    while node.parent is not None:
        yield node
        node = node.parent
