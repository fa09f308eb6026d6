from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina
from stamina.instrumentation import RetryDetails, get_on_retry_hooks, set_on_retry_hooks

from edge_rt.catalog.fetch import FetchSettings, fetch
from edge_rt.catalog.part import Origin, Part, Phase
from edge_rt.catalog.sources import parse_source
from edge_rt.errors import ConfigError, PullError
from tests.file_server import FileServer, answer, cut, ignore_range, stall, status, without_length

CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _no_waits_between_tries() -> Iterator[None]:
    with stamina.set_testing(True, attempts=3):
        yield


class Fetch:
    """One source and the partial file it goes to; each run is a new process' pull as far as the part can tell."""

    def __init__(self, folder: Path, uri: str, **settings: object) -> None:
        self.path = folder / "part"
        self.uri = uri
        self.settings = FetchSettings(**{"hub_endpoint": "https://hub.invalid", **settings})  # type: ignore[arg-type]
        self.steps: list[tuple[Phase, int, int | None]] = []

    def run(self, size_bytes: int = len(CONTENT)) -> str:
        """Fetch and give the sha256 of what came."""

        def report(phase: Phase, done: int, total: int | None) -> None:
            self.steps.append((phase, done, total))

        part = Part(
            self.path,
            Origin(source=self.uri, sha256=SHA256),
            size_bytes=size_bytes,
            free_bytes=lambda: 0,
            report=report,
        )
        with part:
            fetch(parse_source(self.uri), part, self.settings, report, uri=self.uri)
            assert part.sha256 == hashlib.sha256(self.path.read_bytes()).hexdigest()
            return part.sha256


def test_whole_file_in_one_go(tmp_path: Path) -> None:
    with FileServer(CONTENT) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        assert pull.run() == SHA256
    assert server.ranges() == [""]
    assert pull.steps[-1] == ("fetch", len(CONTENT), len(CONTENT))
    assert server.seen[0].headers["accept-encoding"] == "identity"
    assert "authorization" not in server.seen[0].headers


def test_cut_connections_are_taken_up_where_they_broke(tmp_path: Path) -> None:
    # More cuts than tries: each one that brought bytes counts as progress.
    with FileServer(CONTENT, *[cut(40_000)] * 6) as server:
        assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    assert server.ranges() == ["", *[f"bytes={40_000 * n}-" for n in range(1, 7)]]
    assert all(seen.headers["if-range"] == '"v1"' for seen in server.seen[1:])


def test_a_later_pull_goes_on_where_an_earlier_one_gave_up(tmp_path: Path) -> None:
    with FileServer(CONTENT, cut(100_000), *[status(503)] * 6) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        with pytest.raises(PullError, match="HTTP 503"):
            pull.run()
        assert pull.path.stat().st_size == 100_000
        server.script.clear()
        assert pull.run() == SHA256
    assert server.ranges()[-1] == "bytes=100000-"
    assert ("check", 100_000, 100_000) in pull.steps


def test_changed_file_is_not_glued_to_the_old_beginning(tmp_path: Path) -> None:
    with FileServer(bytes(len(CONTENT)), cut(50_000), *[status(503)] * 6) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        with pytest.raises(PullError):
            pull.run()
        server.script.clear()
        server.content, server.etag = CONTENT, '"v2"'
        assert pull.run() == SHA256


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_without_a_strong_tag_there_is_no_if_range(etag: str, tmp_path: Path) -> None:
    with FileServer(CONTENT, cut(50_000), etag=etag) as server:
        assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    assert server.ranges() == ["", "bytes=50000-"]
    assert "if-range" not in server.seen[1].headers


def test_server_that_ignores_ranges_starts_again(tmp_path: Path) -> None:
    with FileServer(CONTENT, cut(50_000), ignore_range) as server:
        assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    assert server.ranges() == ["", "bytes=50000-"]


@pytest.mark.parametrize(
    "content_range", ["bytes 0-299999/300000", "bytes 50001-299999/300000", "lines 50000-299999/300000", ""]
)
def test_server_that_sends_another_range_starts_again(content_range: str, tmp_path: Path) -> None:
    wrong = answer(206, CONTENT[50_000:], Content_Range=content_range)
    with FileServer(CONTENT, cut(50_000), wrong) as server:
        assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    assert server.ranges() == ["", "bytes=50000-", ""]


def test_range_beyond_the_end_starts_again(tmp_path: Path) -> None:
    with FileServer(CONTENT, cut(50_000), status(416)) as server:
        assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    assert server.ranges()[-1] == ""


@pytest.mark.parametrize("content", [CONTENT + b"x", CONTENT[:-1], b"<html>Please log in</html>"])
def test_wrong_size_is_refused_before_a_byte_is_written(content: bytes, tmp_path: Path) -> None:
    with FileServer(content) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        with pytest.raises(PullError, match=f"the server has {len(content)} bytes, the manifest says 300000"):
            pull.run()
    assert pull.path.stat().st_size == 0
    assert len(server.seen) == 1


def test_wrong_total_in_a_range_is_refused(tmp_path: Path) -> None:
    wrong = answer(206, CONTENT[50_000:], Content_Range="bytes 50000-299999/400000")
    with FileServer(CONTENT, cut(50_000), wrong) as server, pytest.raises(PullError, match="has 400000 bytes"):
        Fetch(tmp_path, f"{server.url}/m.gguf").run()


def test_body_longer_than_promised_stops_at_once(tmp_path: Path) -> None:
    with FileServer(CONTENT, without_length(CONTENT * 2)) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        with pytest.raises(PullError, match="longer than 300000 bytes"):
            pull.run()
    assert pull.path.stat().st_size <= len(CONTENT)


def test_compressed_answer_is_refused(tmp_path: Path) -> None:
    with (
        FileServer(CONTENT, answer(200, CONTENT, Content_Encoding="gzip")) as server,
        pytest.raises(PullError, match="compresses"),
    ):
        Fetch(tmp_path, f"{server.url}/m.gguf").run()


@pytest.mark.parametrize("code", [401, 403, 404, 410, 451])
def test_refusal_is_not_tried_again(code: int, tmp_path: Path) -> None:
    with FileServer(CONTENT, status(code)) as server:
        with pytest.raises(PullError, match=f"HTTP {code}"):
            Fetch(tmp_path, f"{server.url}/m.gguf").run()
        assert len(server.seen) == 1


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_tried_again(code: int, tmp_path: Path) -> None:
    with FileServer(CONTENT, status(code), status(code)) as server:
        pull = Fetch(tmp_path, f"{server.url}/m.gguf")
        assert pull.run() == SHA256
        assert len(server.seen) == 3
    assert [step for step in pull.steps if step[0] == "retry"] == [("retry", 0, len(CONTENT))] * 2


def test_lasting_trouble_ends_after_the_last_try(tmp_path: Path) -> None:
    with FileServer(CONTENT, *[status(500)] * 9) as server:
        with pytest.raises(PullError, match=r"HTTP 500 .*127\.0\.0\.1"):
            Fetch(tmp_path, f"{server.url}/m.gguf").run()
        assert len(server.seen) == 3


def test_retry_after_decides_the_wait(tmp_path: Path) -> None:
    waits: list[float] = []

    def hook(details: RetryDetails) -> None:
        waits.append(details.wait_for)

    before = get_on_retry_hooks()
    set_on_retry_hooks([hook])
    try:
        # With real waits, but the one wait is of the zero seconds that the server asks for.
        with stamina.set_testing(False), FileServer(CONTENT, status(429, Retry_After="0")) as server:
            assert Fetch(tmp_path, f"{server.url}/m.gguf").run() == SHA256
    finally:
        set_on_retry_hooks(before)
    assert waits == [0.0]


def test_very_long_retry_after_is_said_and_not_waited_for(tmp_path: Path) -> None:
    with FileServer(CONTENT, status(429, Retry_After="3600")) as server, pytest.raises(PullError, match="3600 s"):
        Fetch(tmp_path, f"{server.url}/m.gguf").run()


def test_nobody_listens(tmp_path: Path) -> None:
    with FileServer(CONTENT) as server:
        url = server.url
    with pytest.raises(PullError, match="refused"):
        Fetch(tmp_path, f"{url}/m.gguf").run()


def test_silent_server_counts_as_a_cut(tmp_path: Path) -> None:
    until = threading.Event()
    with FileServer(CONTENT, stall(70_000, until)) as server:
        try:
            pull = Fetch(tmp_path, f"{server.url}/m.gguf", read_timeout_s=1.0)
            assert pull.run() == SHA256
        finally:
            until.set()
    assert server.ranges() == ["", "bytes=70000-"]


def test_hub_address_and_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    with FileServer(CONTENT) as server:
        pull = Fetch(
            tmp_path,
            "hf:owner/repo/sub dir/m.gguf@v1.0",
            hub_endpoint=f"{server.url}/hub/",
            hub_token_file=str(token),
        )
        assert pull.run() == SHA256
    assert server.seen[0].path == "/hub/owner/repo/resolve/v1.0/sub%20dir/m.gguf"
    assert server.seen[0].headers["authorization"] == "Bearer hf_secret"


def test_token_stays_with_the_hub(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    with FileServer(CONTENT) as mirror, FileServer(b"") as hub:
        hub.script.extend([status(302, Location="/moved"), status(307, Location=f"{mirror.url}/cdn?sig=1")])
        pull = Fetch(tmp_path, "hf:owner/repo/m.gguf@main", hub_endpoint=hub.url, hub_token_file=str(token))
        assert pull.run() == SHA256
    assert [seen.headers.get("authorization") for seen in hub.seen] == ["Bearer hf_secret"] * 2
    assert [seen.path for seen in mirror.seen] == ["/cdn?sig=1"]
    assert "authorization" not in mirror.seen[0].headers


def test_token_is_not_sent_to_other_sources(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    with FileServer(CONTENT) as server:
        Fetch(tmp_path, f"{server.url}/m.gguf", hub_endpoint=server.url, hub_token_file=str(token)).run()
    assert "authorization" not in server.seen[0].headers


@pytest.mark.parametrize("place", ["http://example.com/x", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_redirect_to_a_plain_or_strange_place_is_refused(place: str, tmp_path: Path) -> None:
    with FileServer(CONTENT, status(302, Location=place)) as server, pytest.raises(PullError, match="refused"):
        Fetch(tmp_path, f"{server.url}/m.gguf").run()


def test_redirects_without_end(tmp_path: Path) -> None:
    with FileServer(CONTENT, *[status(302, Location="/again")] * 20) as server:
        with pytest.raises(PullError, match="more than 5 redirects"):
            Fetch(tmp_path, f"{server.url}/m.gguf").run()
        assert len(server.seen) == 6


def test_gated_model_names_the_remedy(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    with FileServer(CONTENT, status(401), status(403)) as server:
        uri = "hf:owner/repo/m.gguf@main"
        with pytest.raises(PullError, match=r"catalog\.hub_token_file"):
            Fetch(tmp_path, uri, hub_endpoint=server.url).run()
        with pytest.raises(PullError, match="licence") as caught:
            Fetch(tmp_path, uri, hub_endpoint=server.url, hub_token_file=str(token)).run()
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "cannot be read"), ("", "one token"), ("a b", "one token"), ("é", "not ASCII")]
)
def test_token_file_that_holds_none(text: str | None, problem: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        Fetch(tmp_path, "hf:o/r/m.gguf@main", hub_endpoint="http://127.0.0.1:9", hub_token_file=str(token)).run()


def test_hub_endpoint_must_be_https(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hub_endpoint"):
        Fetch(tmp_path, "hf:o/r/m.gguf@main", hub_endpoint="http://hub.example").run()


def test_local_file_is_copied_and_taken_up(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(CONTENT)
    pull = Fetch(tmp_path, f"file:{source}")
    assert pull.run() == SHA256
    pull.path.write_bytes(CONTENT[:1000])
    assert pull.run() == SHA256
    assert ("check", 1000, 1000) in pull.steps


def test_local_file_that_is_not_the_one(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="No such file"):
        Fetch(tmp_path, f"file:{tmp_path}/missing").run()
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(PullError, match="it has 1 bytes"):
        Fetch(tmp_path, f"file:{tmp_path}/short").run()
