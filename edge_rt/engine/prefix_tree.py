"""Computed prefixes kept outside the KV: a tree of blocks of tokens, so that what two of them share is kept once.

Tokens are compared, never hashes of them: a reused row is the same row. Each owner has a tree of his own, in which
nobody else's prompt is looked up; where tenants share, all have the owner "".

A back end that saves parts of a sequence (Capabilities.can_save_ranges) has each block's state at its node. One that
saves whole sequences only has them at the ends, and what is only the beginning of another is not kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from edge_rt.engine.prefix_eviction import giver, least_used
from edge_rt.engine.prefix_nodes import (
    TOKEN_BYTES,
    Account,
    InMemory,
    Kept,
    Match,
    Node,
    packed,
    path_to,
    up_from,
)


class PrefixTree:
    """Kept prefixes; ends that are worth least go first, block by block.

    max_bytes  how many bytes may be kept, given how many are
    n_block  tokens of a block, a multiple of the back end's
    worth    see prefix_eviction
    """

    def __init__(
        self,
        max_bytes: Callable[[int], int],
        *,
        n_block: int,
        keeps_ranges: bool,
        worth: Callable[[int, int, int], int] = least_used,
    ) -> None:
        self._max_bytes = max_bytes
        self._worth = worth
        self.n_block = n_block
        self._block_bytes = n_block * TOKEN_BYTES
        self._keeps_ranges = keeps_ranges
        self._roots: dict[str, Node] = {}
        self._accounts: dict[str, Account] = {}  # by user
        self._tick, self._floor, self._order = 0, 0, count()
        self._both: dict[int, Node] = {}  # those whose memory can be had back
        self._growing: Node | None = None  # where put is: it leads to no state yet, and stays
        self.n_bytes = 0
        self.token_bytes = 0.0  # what a token's state takes, once that is known
        self.n_lost = self.n_restored = 0  # states that were of no use; tokens of those that came from the disk

    def find_shared(self, owner: str, token_ids: Sequence[int]) -> Match:
        """Find the longest kept beginning of a prompt that is the owner's, or everybody's."""
        own = self.find(owner, token_ids)
        public = public_part(owner)
        if public == owner or not self._roots.get(public):
            return own
        return max(own, self.find(public, token_ids), key=lambda match: match.n_tokens)

    def find(self, owner: str, token_ids: Sequence[int]) -> Match:
        """Find the longest kept beginning of a prompt among an owner's; it is not marked as used."""
        root = self._roots.get(owner)
        if root is None:
            return Match(0)
        key = packed(token_ids)
        path, n_tokens, node = [], 0, root
        for start in range(0, len(key), self._block_bytes):
            block = key[start : start + self._block_bytes]
            child = node.children.get(block) if len(block) == self._block_bytes else None
            n_shared = child.n_tokens if child is not None else 0
            if child is None:
                child, n_shared = node.nearest(block)
            if child is None:
                break
            path.append(child)
            n_tokens += n_shared
            node = child
            if n_shared < child.n_tokens:
                break
        if self._keeps_ranges or node is root:
            return Match(n_tokens, tuple(path))
        while node.kept is None:  # any whole sequence that goes on from here begins like the prompt
            node = node.children[node.order[0]]
        return Match(n_tokens, (node,))

    def touch(self, match: Match) -> None:
        """Mark what was found as used just now."""
        self._tick += 1
        for last in match.nodes[-1:]:
            n_before = 0
            for node in path_to(last):
                n_before += node.n_tokens
                node.n_hits += n_before <= match.n_tokens
                node.worth = self._worth(self._floor, self._tick, node.n_hits), self._tick
            self._age(last)

    def lower(self, match: Match) -> None:
        """Let what was found leave before anything else: it is in the KV now, and is put here again from there."""
        for last in match.nodes[-1:]:
            for node in path_to(last):
                node.worth = self._floor - 1, self._tick  # what is still here is worth more than what left last
            self._age(last)

    def put(
        self,
        owner: str,
        token_ids: Sequence[int],
        save: Callable[[int, int | None], Kept],
        go_on: Callable[[], bool] = lambda: True,
        *,
        n_hot: int = 0,
    ) -> bool:
        """Keep a sequence, as far as there is room for it; False where go_on ended it before.

        n_hot  tokens of it that another request has begun with too

        save  gives the state of the positions from the first number up to the second; to the end with None
        """
        key = packed(token_ids)
        node = self._roots.get(owner) or self._add_root(owner)
        self._tick += 1
        is_cut_off = False
        for start in range(0, len(key), self._block_bytes):
            self._growing = node
            block = key[start : start + self._block_bytes]
            if (child := node.children.get(block)) is None:
                nearest, n_shared = node.nearest(block)
                if nearest is not None and n_shared * TOKEN_BYTES == len(block):  # all of it is there, and more
                    child = nearest
                elif (is_cut_off := not go_on()) or (child := self._add(node, block, start, save)) is None:
                    break
                elif nearest is not None and _is_unfinished(nearest, n_shared):
                    self._drop_end(nearest)  # an unfinished block, now the beginning of a whole one
            elif child.kept is not None and not child.kept.is_there:  # its file has gone
                child.is_written = False
                self._exchange(child, save(start // TOKEN_BYTES, (start + len(block)) // TOKEN_BYTES))
            child.n_hits += start + len(child.key) <= n_hot * TOKEN_BYTES
            child.worth = self._worth(self._floor, self._tick, child.n_hits), self._tick
            node = child
        else:
            is_missing = node.kept is None or not node.kept.is_there
            if not self._keeps_ranges and is_missing and not node.children:
                self._growing = node
                self._keep_whole(node, save(0, None))
        self._growing = None
        self._prune(node)
        self._age(node)
        return not is_cut_off

    def _add_root(self, owner: str) -> Node:
        user = owner.partition("\0")[0]  # with whatever adapters
        root = self._roots[owner] = Node(b"", None, self._accounts.setdefault(user, Account()))
        return root

    def _add(self, node: Node, block: bytes, start: int, save: Callable[[int, int | None], Kept]) -> Node | None:
        kept = None
        if self._keeps_ranges:
            first = start // TOKEN_BYTES
            kept = save(first, first + len(block) // TOKEN_BYTES)
        if not self._make_room(len(block) + (kept.n_bytes if kept is not None else 0), beside=node):
            return None
        child = node.add(block, kept)
        self._count(child, 1)
        return child

    def pin(self, owner: str, token_ids: Sequence[int]) -> Node | None:
        """Let a kept prefix stay, unless it is found damaged; give its end for unpin, None if not all of it is kept."""
        match = self.find(owner, token_ids)
        if match.n_tokens < len(token_ids):
            return None
        for node in up_from(match.nodes[-1]):
            node.n_pins += 1
        return match.nodes[-1]

    def unpin(self, end: Node) -> None:
        """Let what was pinned up to an end go when its turn comes, also where the end is not there any more."""
        for node in up_from(end):
            node.n_pins -= 1
        self._age(end)

    def drop(self, node: Node) -> None:
        """Forget a state that cannot be restored, and all that goes on from it."""
        self.n_lost += 1
        self._forget(node)

    def _forget(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._forget(child)
        if node.parent is not None and node.is_there:
            self._count(node, -1)
            node.remove()
            self._prune(node.parent)

    def hold(self, node: Node, state: NDArray[np.uint8], on_disk: Kept) -> bool:
        """Keep in memory what was read from the disk for a node; False where something would have to leave for it."""
        if not self.has_room(state.nbytes):
            return False
        self._exchange(node, InMemory(state, on_disk))
        return True

    def has_room(self, n_bytes: int) -> bool:
        """Say whether so many bytes more may be kept and nothing need leave for them."""
        return self.n_bytes + n_bytes <= self.limit_bytes()

    def has_file(self, node: Node, on_disk: Kept) -> None:
        """Note that a file has a node's state too, which need not stay in memory then."""
        if isinstance(node.kept, InMemory) and node.kept.on_disk is None:
            self._exchange(node, InMemory(node.kept.state, on_disk))

    def rescue(self, node: Node, state: NDArray[np.uint8]) -> None:
        """Have a state in memory alone, as its file goes; the caller shrinks then."""
        self._exchange(node, InMemory(state))
        self._age(node)

    def bytes_of(self, n_tokens: int) -> float:
        """Say what so many tokens take, as far as that is known."""
        return n_tokens * (TOKEN_BYTES + self.token_bytes)

    def limit_bytes(self) -> int:
        """Say how many bytes may be kept now."""
        return self._max_bytes(self.n_bytes)

    def shrink(self) -> None:
        """Drop what is more than may be kept by now."""
        self._make_room(0, beside=Node(b"", None, Account()))

    def n_states(self, n_tokens: int) -> int:
        """Count the states that so many tokens are kept in."""
        return -(-n_tokens // self.n_block) if self._keeps_ranges else 1

    def savable(self, nodes: tuple[Node, ...], n_hot: int) -> tuple[Node, ...]:
        """Give those of an end's nodes that may outlast the process, of which the first n_hot have been of use."""
        if self._keeps_ranges:
            return nodes[:n_hot]
        return nodes if n_hot and nodes[-1].kept is not None else ()

    def ends(self) -> Iterator[tuple[str, bytes, Node]]:
        """Give owner, packed tokens and last node of everything kept."""
        for owner, root in self._roots.items():
            stack = [(root, b"")]
            while stack:
                node, key = stack.pop()
                stack += [(child, key + child.key) for child in node.children.values()]
                if node is not root and not node.children:
                    yield owner, key, node

    # What stays.

    def _count(self, node: Node, sign: int) -> None:
        n_bytes = sign * (len(node.key) + (node.kept.n_bytes if node.kept is not None else 0))
        self.n_bytes += n_bytes
        node.account.n_bytes += n_bytes
        if isinstance(node.kept, InMemory) and node.kept.on_disk is not None:
            if sign > 0:
                self._both[id(node)] = node
            else:
                del self._both[id(node)]

    def _exchange(self, node: Node, kept: Kept | None) -> None:
        self._count(node, -1)
        node.kept = kept
        self._count(node, 1)

    def _age(self, node: Node) -> None:
        if node.children or node.parent is None:
            return
        account = node.account
        heappush(account.ends, (node.worth, next(self._order), node))
        if len(account.ends) > account.max_ends:  # what is no end any more, or has been used since, goes
            fresh = {id(entry[2]): entry for entry in account.ends if _is_end(entry[2], entry[0])}
            account.ends = sorted(fresh.values())
            account.max_ends = 256 + 2 * len(account.ends)

    def _make_room(self, n_bytes: int, *, beside: Node) -> bool:
        """Drop the ends of least worth until n_bytes fit; False if what is left is pinned, on the way to beside, or of
        users with no more than their share.

        What is on the disk too leaves memory before anything is dropped, pinned or not: it is not lost by it.
        """
        limit = self._max_bytes(self.n_bytes) - n_bytes
        if self.n_bytes <= limit:
            return True
        for node in sorted(self._both.values(), key=lambda node: (node.n_pins > 0, node.worth)):
            kept = node.kept
            if self.n_bytes > limit and isinstance(kept, InMemory) and kept.on_disk is not None:
                self._exchange(node, kept.on_disk if kept.on_disk.is_there else InMemory(kept.state))
        if self.n_bytes <= limit:
            return True
        own = set(map(id, up_from(beside)))
        held: list[tuple[tuple[int, int], int, Node]] = []
        accounts, all_bytes = self._accounts, limit + n_bytes
        while self.n_bytes > limit and (account := giver(accounts.values(), beside.account, all_bytes)) is not None:
            entry = heappop(account.ends)
            worth, _, node = entry
            if not _is_end(node, worth) or (node.kept is not None and node.kept.n_bytes == 0):
                continue  # what is on the disk alone would free nothing
            if node.n_pins or id(node) in own:
                held.append(entry)
            else:
                self._floor = max(self._floor, worth[0])
                self._drop_end(node)
        for entry in held:
            heappush(entry[2].account.ends, entry)
        return self.n_bytes <= limit

    def _drop_end(self, node: Node) -> None:
        parent = node.parent
        self._count(node, -1)
        node.remove()
        if parent is not None:
            self._prune(parent)
            self._age(parent)

    def _prune(self, node: Node) -> None:
        """Take away nodes that lead to no state, and owners without any."""
        while node.parent is not None and not node.children and node.kept is None and node is not self._growing:
            parent = node.parent
            self._count(node, -1)
            node.remove()
            node = parent
        if node.parent is None and not node.children and node is not self._growing:
            for owner in [owner for owner, root in self._roots.items() if root is node]:
                del self._roots[owner]
            if all(root.account is not node.account for root in self._roots.values()):
                self._accounts = {user: each for user, each in self._accounts.items() if each is not node.account}

    def _keep_whole(self, node: Node, kept: Kept) -> None:
        """Put a whole sequence at its end, instead of those that are only its beginning."""
        for before in up_from(node):
            if before.kept is not None and before.n_pins == 0:
                self._exchange(before, None)
        if self._make_room(kept.n_bytes, beside=node):
            self._exchange(node, kept)


def public_part(owner: str) -> str:
    """Name whose prefixes everybody may begin with: what was pinned for all, where users are isolated."""
    return owner[owner.find("\0") :] if "\0" in owner else ""


def _is_end(node: Node, worth: tuple[int, int]) -> bool:
    return node.worth == worth and not node.children and node.is_there


def _is_unfinished(node: Node, n_shared: int) -> bool:
    """Say whether a node that shares so many tokens with a newer block is only its beginning, and may go."""
    return node.is_there and n_shared == node.n_tokens and not node.n_pins
