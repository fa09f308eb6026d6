"""The pure parts: events, addresses, retries, speeds."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cloud import address, retry
from edge_rt.cloud.events import EventError, EventReader
from edge_rt.cloud.speed import Recent

# Events.


def read(data: bytes, cuts: list[int]) -> list[bytes]:
    reader = EventReader()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [event for begin, end in pairwise(edges) for event in reader.feed(data[begin:end])]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\r\n\r\ndata: b\r\rdata:  c\n\n", [b"a", b"b", b" c"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b": hello\nevent: x\nid: 7\nretry: 3\ndata: a\n\n", [b"a"]),
        (b"data\n\n", [b""]),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"data: not whole\n", []),
        (b"data: \xff\x00\n\n", [b"\xff\x00"]),
        (b"datax: a\n\n", []),
    ],
)
def test_events_are_read_by_the_rules(data: bytes, events: list[bytes]) -> None:
    assert read(data, []) == events
    assert read(data, list(range(len(data)))) == events


@given(
    st.lists(st.sampled_from([b"data: a", b"data:", b":c", b"\r\n", b"\n", b"\r", b"x", b" ", b"event: e", b"\xff"])),
    st.lists(st.integers(0, 200)),
)
def test_cuts_change_nothing(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    assert read(data, cuts) == read(data, [])


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("data", "limits", "says"),
    [
        (b"x" * 2000, {"max_event_bytes": 100}, "a line of more than 100"),
        (b"data: 123\n" * 200, {"max_event_bytes": 100}, "an event of more than 100"),
        (b"\n: x\n" * 400, {"max_stream_bytes": 100}, "more than 100 bytes"),
    ],
)
def test_limits_are_kept_in_any_cut(data: bytes, limits: dict[str, int], says: str, step: int) -> None:
    reader = EventReader(**limits)
    with pytest.raises(EventError, match=says):  # noqa: PT012
        for at in range(0, len(data), step):
            reader.feed(data[at : at + step])


# Addresses.


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "240.0.0.1",
        "::1",
        "fe80::1",
        "fc00::1",
        "fd12::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "2002:a00:1::",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "64:ff9b::7f00:1",
    ],
)
def test_private_addresses_need_leave(text: str) -> None:
    assert address.problem(ip_address(text), allow_private=False)
    assert not address.problem(ip_address(text), allow_private=True)


@pytest.mark.parametrize("text", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_need_none(text: str) -> None:
    assert not address.problem(ip_address(text), allow_private=False)


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"])
def test_what_is_no_server_is_refused_always(text: str) -> None:
    assert address.problem(ip_address(text), allow_private=True)


def test_names_are_looked_up_beside_the_loop() -> None:
    async def main() -> None:
        assert {"127.0.0.1", "::1"} & set(await address.resolve("localhost", 80))
        with pytest.raises((OSError, UnicodeError)):
            await address.resolve("x" * 64 + ".invalid", 80)
        before = threading.active_count()
        names = [address.resolve("localhost", 80) for _ in range(100)]
        found = await asyncio.gather(*names, return_exceptions=True)
        assert any(isinstance(one, tuple) for one in found)
        assert threading.active_count() <= before + 8

    asyncio.run(main())


# Retries.


def test_a_pause_grows_and_ends() -> None:
    pauses = [retry.pause_s(n, 1.0, 0.0) for n in range(1, retry.MAX_TRIES + 1)]
    assert pauses == [0.2, 0.4, None]
    assert retry.pause_s(1, 0.0, 0.0) == 0.0
    assert retry.pause_s(1, 0.5, 2.0) == 2.1
    assert retry.pause_s(1, 0.5, 60.0) is None


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_no_more_retries_than_their_share_and_a_few(share: float, asks: list[bool]) -> None:
    budget = retry.RetryBudget(share)
    n_requests = n_retries = 0
    for is_request in asks:
        if is_request:
            budget.request()
            n_requests += 1
        else:
            n_retries += budget.take()
    assert n_retries <= share * n_requests + 3 + 1e-6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-1", None),
        ("soon", None),
        ("", None),
        (None, None),
        ("1e9", None),
        ("9" * 40, None),
        ("٧", None),
        ("Mon, 30 Nov 2026 03:00:20 GMT", 20.0),
        ("Mon, 30 Nov 2026 02:00:00 GMT", 0.0),
        ("Mon, 99 Nov 2026 02:00:00 GMT", None),
    ],
)
def test_retry_after_is_read(value: str | None, expected: float | None) -> None:
    assert retry.retry_after_s(value, datetime(2026, 11, 30, 3, tzinfo=UTC)) == expected


def test_a_date_is_counted_from_now() -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=100)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    found = retry.retry_after_s(soon)
    assert found is not None
    assert 90 < found <= 100


# Speeds.


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_those_of_the_last_values(values: list[float], share: float) -> None:
    recent = Recent(16)
    for value in values:
        recent.add(value)
    last = sorted(values[-16:])
    assert len(recent) == len(last)
    assert recent.quantile(share) == last[min(int(share * len(last)), len(last) - 1)]
    assert Recent().quantile(0.5) is None
