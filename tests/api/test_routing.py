"""Two real daemons: one is the other's cloud."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.daemon import Daemon

EDGE = """
[cloud.big]
base_url = "unix:{socket}"
model = "null"
price_in = 1.0
price_out = 2.0
retry_s = 0.2

[router]
scorer = false
hold_back_tokens = 0
"""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    far, near = tmp_path_factory.mktemp("far"), tmp_path_factory.mktemp("near")
    with Daemon(far) as big, Daemon(near, extra=EDGE.format(socket=big.socket)) as edge:
        yield edge, big


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields


def said(headers: httpx2.Headers) -> tuple[str | None, str | None]:
    return headers.get("x-edge-route"), headers.get("x-edge-cache")


def test_the_cloud_answers_who_asks_for_it_and_tells_the_cost(pair: tuple[Daemon, Daemon]) -> None:
    edge, _ = pair
    with edge.client() as client:
        here = client.post(CHAT, json=body("how are you"))
        there = client.post(CHAT, json=body("how are you", route="cloud"))
    assert here.json()["choices"] == there.json()["choices"]
    assert (said(here.headers), said(there.headers)) == (("local", "miss"), ("cloud", "miss"))
    usage = there.json()["usage"]
    cost = (usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6
    assert float(there.headers["x-edge-cost"]) == pytest.approx(cost, abs=1e-6)
    assert edge.metric('edge_rt_cloud_answers_total{endpoint="big"}') == 1


def test_a_stream_from_the_cloud_is_a_stream_like_any_other(pair: tuple[Daemon, Daemon]) -> None:
    edge, _ = pair
    with (
        edge.client() as client,
        client.stream("POST", CHAT, json=body("abc def", stream=True), headers={"x-edge-route": "cloud"}) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line]
    assert said(answer.headers) == ("cloud", "miss")
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "abc def"
    assert events[-1]["origin"]["endpoint"] == "big"


def test_what_is_private_never_reaches_the_other_daemon(pair: tuple[Daemon, Daemon]) -> None:
    edge, big = pair
    before = big.metric("edge_rt_http_requests_total")
    with edge.client() as client:
        refused = client.post(CHAT, json=body("write to jane.doe@example.com", route="cloud"))
        kept = client.post(CHAT, json=body("write to jane.doe@example.com"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "must_stay")
    assert kept.headers["x-edge-route-reason"] == "private"
    assert big.metric("edge_rt_http_requests_total") <= before + 1  # the one that read this


def test_the_same_question_again_is_answered_from_the_store_and_regenerates_from_the_cloud(
    pair: tuple[Daemon, Daemon],
) -> None:
    edge, _ = pair
    with edge.client() as client:
        asked = [client.post(CHAT, json=body("what is it")) for _ in range(3)]
        fresh = client.post(CHAT, json=body("what is it"), headers={"cache-control": "no-cache"})
        never = client.post(CHAT, json=body("something else"), headers={"cache-control": "only-if-cached"})
    assert [said(answer.headers)[1] for answer in asked] == ["miss", "hit-exact", "hit-exact"]
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in asked}) == 1
    assert int(asked[1].headers["age"]) >= 0
    assert said(fresh.headers)[1] == "bypass"
    assert (never.status_code, never.json()["error"]["code"]) == (504, "not_cached")


def test_like_requests_in_flight_share_one_generation(pair: tuple[Daemon, Daemon]) -> None:
    edge, _ = pair
    with edge.client() as client:
        client.post(CHAT, json=body("warm", model="null-slow"))
        before = edge.metric('edge_rt_completion_tokens_total{model="null-slow"}')

        def ask(_: int) -> str:
            answer: str = client.post(CHAT, json=body("a b c d e f g h i j", model="null-slow")).json()["choices"][0][
                "message"
            ]["content"]
            return answer

        with ThreadPoolExecutor(8) as pool:
            texts = set(pool.map(ask, range(8)))
    assert texts == {"a b c d e f g h i j"}
    n_tokens = edge.metric('edge_rt_completion_tokens_total{model="null-slow"}') - before
    assert 0 < n_tokens <= len("a b c d e f g h i j") + 1


def test_a_decision_is_explained_and_nothing_is_asked(pair: tuple[Daemon, Daemon]) -> None:
    edge, _ = pair
    with edge.client() as client:
        told = client.post("/v1/route/explain", json=body("my card is 4111 1111 1111 1111")).json()
    assert (told["where"], told["reason"]) == ("local", "private")
    assert "4111" not in json.dumps(told)


def test_when_the_cloud_goes_down_the_device_answers(tmp_path: Path) -> None:
    far, near = tmp_path / "f", tmp_path / "n"
    far.mkdir()
    near.mkdir()
    to_cloud = EDGE + 'route = "cloud"\n'
    with Daemon(far) as big, Daemon(near, extra=to_cloud.format(socket=big.socket)) as edge, edge.client() as client:
        assert client.post(CHAT, json=body("one")).headers["x-edge-route"] == "cloud"
        big.stop(signal.SIGKILL)
        answers = [client.post(CHAT, json=body(f"number {i}")) for i in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-edge-route"] for answer in answers} == {"local"}
        reasons = [answer.headers["x-edge-route-reason"] for answer in answers]
        assert reasons[0] == "cloud-failed"
        assert reasons[-1] == "cloud-down"
        wished = client.post(CHAT, json=body("only there", route="cloud"))
        assert (wished.status_code, wished.headers["x-edge-route"]) == (200, "local")


def test_a_stream_from_the_cloud_is_finished_before_the_daemon_ends(tmp_path: Path) -> None:
    far, near = tmp_path / "f", tmp_path / "n"
    far.mkdir()
    near.mkdir()
    slow = EDGE.replace('model = "null"', 'model = "null-slow"')
    text = "a b c d e f g h i j k l m n o p"
    with (
        Daemon(far) as big,
        Daemon(near, extra=slow.format(socket=big.socket)) as edge,
        edge.client() as client,
        client.stream("POST", CHAT, json=body(text, stream=True, route="cloud")) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        edge.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == text
        assert edge.wait() == 0
