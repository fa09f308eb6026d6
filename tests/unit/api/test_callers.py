from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edge_rt.api.callers import ApiKeys, Peer, tenant
from edge_rt.errors import AuthError, ConfigError

KEYS = ApiKeys(("first-key", "second-key"))


def bearer(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", value)]


def test_the_kernel_names_the_peer() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert Peer.of(left) == Peer(pid=os.getpid(), uid=os.getuid(), gid=os.getgid())


def test_tcp_has_no_peer() -> None:
    with socket.socket(socket.AF_INET) as sock:
        assert Peer.of(sock) is None


def test_a_unix_peer_needs_no_key() -> None:
    peer = Peer(pid=1, uid=1000, gid=1000)
    assert tenant(peer, None, []) == "uid:1000"
    assert tenant(peer, KEYS, bearer(b"Bearer wrong")) == "uid:1000"


def test_a_key_is_a_tenant_without_showing_itself() -> None:
    first, second = tenant(None, KEYS, bearer(b"Bearer first-key")), tenant(None, KEYS, bearer(b"bearer second-key "))
    assert first != second
    assert first.startswith("key:")
    assert "first-key" not in first


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(b""),
        bearer(b"Bearer"),
        bearer(b"Bearer "),
        bearer(b"Bearer wrong"),
        bearer(b"Bearer first-key2"),
        bearer(b"Bearer first"),
        bearer(b"Basic first-key"),
        bearer(b"first-key"),
        bearer(b"Bearer \xff\xfe"),
    ],
)
def test_without_a_right_key_nobody_passes(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(AuthError):
        tenant(None, KEYS, headers)


def test_without_keys_nobody_passes_over_tcp() -> None:
    with pytest.raises(AuthError):
        tenant(None, None, bearer(b"Bearer first-key"))


def test_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\n\n  one  \ntwo\n")
    keys = ApiKeys.load(path)
    assert keys.tenant(b"Bearer one") != keys.tenant(b"Bearer two")
    with pytest.raises(AuthError):
        keys.tenant(b"Bearer # mine")


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"\xff\xfe"])
def test_a_keys_file_without_keys_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"server\.api_keys_file"):
        ApiKeys.load(path)


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    key = (b"x-api-key", b"first-key")
    assert tenant(None, KEYS, [key]) == tenant(None, KEYS, bearer(b"Bearer first-key"))
    with pytest.raises(AuthError):
        tenant(None, KEYS, [(b"x-api-key", b"wrong")])
    with pytest.raises(AuthError):  # the header that is meant for keys counts
        tenant(None, KEYS, [key, *bearer(b"Bearer wrong")])
