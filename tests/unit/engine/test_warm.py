"""Warm starts on the null back end: what outlasts an engine, and who may use it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.engine.pinning import pin, system_ids
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.errors import ContextLengthError, EdgeRtError, InvalidRequestError
from edge_rt.types import GenerateRequest, Message, PinnedPrefix
from tests.unit.engine.null_engine import Answer, Bench, Recorder, Whole, chat

SYSTEM = "You answer in one word. " * 6


def bench(folder: Path, **settings: Any) -> Bench:
    disk = PrefixDisk(folder / "p", settings.pop("key", "k"), 10**8, free_bytes=lambda _: 10**12)
    return Bench(disk=disk, **settings)


def end(*benches: Bench) -> None:
    """End engines as a process does, which drops its lock."""
    for one in benches:
        one.engine.stop(0.0)
        one.engine.run()


def talk(text: str, request_id: str, system: str = SYSTEM, **fields: Any) -> GenerateRequest:
    messages = (Message(role="system", content=system), Message(role="user", content=text))
    return GenerateRequest(id=request_id, model="null", messages=messages, **fields)


def cached(answer: Answer) -> int:
    assert answer.last.usage is not None
    return answer.last.usage.cached_tokens


def rest(one: Bench) -> None:
    """Let the engine have a moment without requests, as its loop does."""
    one.engine._slots.save_idle(lambda: True)
    while (asked := one.engine.warm.request()) is not None:
        one.engine.submit(*asked)
        one.engine.step()
        while (stats := one.engine.stats()).running or stats.waiting:
            one.engine.step()
        one.engine._slots.save_idle(lambda: True)
    one.engine.warm.save(lambda: True)


def pins(one: Bench, **fields: Any) -> list[PinnedPrefix]:
    heard: list[list[PinnedPrefix] | EdgeRtError] = []
    pin(one.engine, heard.append, **{"action": "list", "tenant": "", **fields})
    one.engine.step()
    (found,) = heard
    if isinstance(found, EdgeRtError):
        raise found
    return found


def test_a_prefix_that_leaves_no_room_for_a_question_is_not_pinned(tmp_path: Path) -> None:
    one = bench(tmp_path)
    with pytest.raises(ContextLengthError):
        pins(one, action="pin", name="long", text="w" * 2000)
    one.engine.step()
    assert pins(one) == []


@pytest.mark.parametrize("session_type", [Recorder, Whole])
def test_what_was_often_used_is_there_after_a_restart(tmp_path: Path, session_type: type[Recorder]) -> None:
    before = bench(tmp_path, session_type=session_type)
    for name in "abc":
        before.run(before.ask(talk(name, name)))
    rest(before)
    end(before)
    after = bench(tmp_path, session_type=session_type)
    answer = after.ask(talk("d", "d"))
    after.run(answer)
    assert answer.text == "d"
    assert cached(answer) >= len(SYSTEM) // 32 * 32
    stats = after.engine.stats()
    assert stats.restored_tokens_total >= cached(answer)
    assert stats.prefix_disk_bytes > 0
    end(after)


def stored(folder: Path, *names: str, **settings: Any) -> None:
    """Let an engine pin texts and end."""
    before = bench(folder, **settings)
    for name in names:
        pins(before, action="pin", name=name, text=f"{name}: {SYSTEM}")
    rest(before)
    end(before)


@pytest.mark.parametrize("session_type", [Recorder, Whole])
def test_prefixes_are_read_before_anybody_asks(tmp_path: Path, session_type: type[Recorder]) -> None:
    stored(tmp_path, "a", "b", session_type=session_type)
    after = bench(tmp_path, session_type=session_type)
    n_bytes = after.engine.stats().prefix_bytes
    after.engine.warm.read_ahead(lambda: True)
    stats = after.engine.stats()
    assert stats.restored_tokens_total == sum(p.n_tokens for p in pins(after))
    assert stats.prefix_bytes > n_bytes + 4 * stats.restored_tokens_total
    for path in (tmp_path / "p").glob("*.kv"):
        path.unlink()
    for name in "ab":
        answer = after.ask(talk("x", name, f"{name}: {SYSTEM}"))
        after.run(answer)
        assert (answer.text, cached(answer)) == ("x", len(SYSTEM) + 4)
    assert after.engine.stats().restored_tokens_total == stats.restored_tokens_total
    end(after)


def test_reading_ahead_stops_for_a_request_and_goes_on_later(tmp_path: Path) -> None:
    stored(tmp_path, "a", "b")
    after = bench(tmp_path)
    left = [True] * 3 + [False]
    after.engine.warm.read_ahead(lambda: left.pop(0))
    assert after.engine.stats().restored_tokens_total == 3 * 32
    answer = after.ask(talk("x", "x", f"b: {SYSTEM}"))
    after.run(answer)  # it reads what is not there yet itself
    assert cached(answer) == len(SYSTEM) + 4
    after.engine.warm.read_ahead(lambda: True)
    assert all(p.is_kept for p in pins(after))
    end(after)


def test_nothing_leaves_for_what_is_read_ahead(tmp_path: Path) -> None:
    stored(tmp_path, "a", "b", "c")
    after = bench(tmp_path, max_prefix_bytes=4500)
    after.run(after.ask(chat("something else " * 10, "other")))
    after.engine._slots.save_idle(lambda: True)
    after.engine.warm.read_ahead(lambda: True)
    assert 0 < after.engine.stats().restored_tokens_total < sum(p.n_tokens for p in pins(after))
    assert after.engine.stats().prefix_bytes <= 4500
    for path in (tmp_path / "p").glob("*.kv"):
        path.unlink()
    after.engine.warm.read_ahead(lambda: True)  # what has no room is not even read
    assert after.engine.stats().prefixes_lost_total == 0
    again = after.ask(chat("something else " * 10, "again"))
    after.run(again)
    assert cached(again) > 150
    end(after)


def test_what_is_on_the_disk_leaves_memory_first_and_is_not_lost(tmp_path: Path) -> None:
    stored(tmp_path, "a")
    after = bench(tmp_path, max_prefix_bytes=3500)
    after.engine.warm.read_ahead(lambda: True)
    n_read = after.engine.stats().restored_tokens_total
    for number in range(4):
        after.run(after.ask(chat(f"{number}" * 150, str(number))))
        after.engine._slots.save_idle(lambda: True)
    assert after.engine.stats().prefix_bytes <= 3500
    answer = after.ask(talk("x", "x", f"a: {SYSTEM}"))
    after.run(answer)
    assert cached(answer) == n_read
    assert after.engine.stats().restored_tokens_total > n_read
    assert after.engine.stats().prefixes_lost_total == 0
    end(after)


def test_what_has_been_written_is_not_lost_when_memory_is_wanted(tmp_path: Path) -> None:
    one = bench(tmp_path, max_prefix_bytes=3500)
    for name in "abc":
        one.run(one.ask(talk(name, name)))
    rest(one)
    for number in range(4):
        one.run(one.ask(chat(f"{number}" * 150, str(number))))
        one.engine._slots.save_idle(lambda: True)
    answer = one.ask(talk("d", "d"))
    one.run(answer)
    assert cached(answer) >= len(SYSTEM) // 32 * 32
    assert one.engine.stats().restored_tokens_total > 0
    end(one)


def test_a_damaged_file_is_found_while_reading_ahead_and_its_pin_computed_again(tmp_path: Path) -> None:
    stored(tmp_path, "a")
    (path,) = (tmp_path / "p").glob("*.kv")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    after = bench(tmp_path)
    after.engine.warm.read_ahead(lambda: True)
    assert after.engine.stats().prefixes_lost_total == 1
    rest(after)
    assert [(p.is_kept, p.is_on_disk) for p in pins(after)] == [(True, True)]
    end(after)


def test_what_two_pins_share_outlasts_the_file_of_one(tmp_path: Path) -> None:
    texts = {"a": SYSTEM + "Be brief. " * 8, "b": SYSTEM + "Be kind. " * 8}
    before = bench(tmp_path)
    for name, text in texts.items():
        pins(before, action="pin", name=name, text=text)
    rest(before)
    end(before)
    for gone, left in (("a", "b"), ("b", "a")):
        after = bench(tmp_path)
        pins(after, action="unpin", name=gone)
        assert [(p.name, p.is_kept) for p in pins(after)] == [(left, True)]
        answer = after.ask(talk("x", "x", texts[left]))
        after.run(answer)
        assert cached(answer) == len(texts[left]) + 1
        assert after.engine.stats().prefixes_lost_total == 0
        pins(after, action="pin", name=gone, text=texts[gone])
        rest(after)
        end(after)


def test_what_was_used_once_is_not_written(tmp_path: Path) -> None:
    one = bench(tmp_path)
    one.run(one.ask(talk("a", "a")))
    rest(one)
    assert one.engine.stats().prefix_disk_bytes == 0
    end(one)


def test_a_pin_is_computed_by_nobodys_request_and_stays(tmp_path: Path) -> None:
    one = bench(tmp_path, max_prefix_bytes=6000)
    assert [p.is_kept for p in pins(one, action="pin", name="house", text=SYSTEM)] == [False]
    rest(one)
    (found,) = pins(one)
    assert (found.name, found.is_kept, found.is_on_disk) == ("house", True, True)
    assert found.n_tokens == len(system_ids(one.engine, SYSTEM))
    for number in range(30):
        one.run(one.ask(chat(f"{number:02d}" * 50, str(number))))
        one.engine._slots.save_idle(lambda: True)
    answer = one.ask(talk("x", "x"))
    one.run(answer)
    assert cached(answer) == found.n_tokens
    end(one)
    after = bench(tmp_path)
    first = after.ask(talk("y", "y"))
    after.run(first)
    assert (cached(first), first.text) == (found.n_tokens, "y")
    assert [p.name for p in pins(after)] == ["house"]
    assert pins(after, action="unpin", name="house") == []
    assert after.engine.stats().prefix_disk_bytes == 0
    with pytest.raises(InvalidRequestError, match="nothing is pinned"):
        pins(after, action="unpin", name="house")
    end(after)


def test_another_text_takes_a_name(tmp_path: Path) -> None:
    one = bench(tmp_path)
    pins(one, action="pin", name="a", text=SYSTEM)
    rest(one)
    pins(one, action="pin", name="a", text=SYSTEM.upper())
    rest(one)
    answer = one.ask(talk("x", "x", SYSTEM.upper()))
    one.run(answer)
    assert cached(answer) == len(SYSTEM) + 1
    assert len(pins(one)) == 1
    end(one)


def test_a_damaged_file_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = bench(tmp_path)
    pins(before, action="pin", name="a", text=SYSTEM)
    rest(before)
    end(before)
    (path,) = (tmp_path / "p").glob("*.kv")
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    after = bench(tmp_path)
    answer = after.ask(talk("x", "x"))
    after.run(answer)
    assert (answer.text, cached(answer)) == ("x", 96)  # the blocks before the one that is damaged
    assert after.engine.stats().prefixes_lost_total == 1
    assert "damaged" in caplog.text
    assert not path.exists()
    assert [(p.is_kept, p.is_on_disk) for p in pins(after)] == [(False, False)]
    rest(after)
    assert [(p.is_kept, p.is_on_disk) for p in pins(after)] == [(True, True)]
    end(after)
    (again,) = (tmp_path / "p").glob("*.kv")
    assert again != path


def test_no_token_of_a_damaged_file_is_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = bench(tmp_path)
    pins(before, action="pin", name="a", text=SYSTEM)
    (pin_ids,) = [pin.token_ids for pin in before.engine.warm._pins.values()]
    rest(before)
    end(before)
    (path,) = (tmp_path / "p").glob("*.kv")
    raw = bytearray(path.read_bytes())
    raw[raw.index(array("i", pin_ids).tobytes()) + 40] ^= 1
    path.write_bytes(raw)
    after = bench(tmp_path)
    assert pins(after) == []
    assert "damaged" in caplog.text
    assert not path.exists()
    end(after)


def test_a_state_of_fewer_tokens_than_it_should_have_is_not_used(tmp_path: Path) -> None:
    class Short(Recorder):
        def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
            super().seq_load(seq_id, state[:-4])

    before = bench(tmp_path)
    pins(before, action="pin", name="a", text=SYSTEM)
    rest(before)
    end(before)
    after = bench(tmp_path, session_type=Short)
    answer = after.ask(talk("x", "x"))
    after.run(answer)
    assert (answer.text, cached(answer)) == ("x", 0)
    end(after)


def test_files_of_isolated_users_are_given_to_nobody_else(tmp_path: Path) -> None:
    before = bench(tmp_path, isolate_prefixes=True)
    for number in range(3):
        before.run(before.ask(talk(str(number), str(number), tenant="uid:1")))
    pins(before, action="pin", name="mine", text=SYSTEM * 2, tenant="uid:1")
    pins(before, action="pin", name="house", text="For all of you. " * 10, tenant="")
    rest(before)
    assert [p.name for p in pins(before, tenant="uid:2")] == ["house"]
    assert sorted(p.name for p in pins(before, tenant="uid:1")) == ["house", "mine"]
    end(before)
    assert any(b"uid:1" in path.read_bytes() for path in (tmp_path / "p").glob("*.kv"))
    after = bench(tmp_path, isolate_prefixes=True)
    answers = [after.ask(talk("x", tenant, tenant=tenant)) for tenant in ("uid:2", "uid:1")]
    after.run(*answers)
    assert [cached(a) > 0 for a in answers] == [False, True]
    for tenant in ("uid:1", "uid:2"):
        house = after.ask(talk("x", f"house {tenant}", "For all of you. " * 10, tenant=tenant))
        after.run(house)
        assert cached(house) == 161
    end(after)


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    before = bench(tmp_path)
    pins(before, action="pin", name="a", text=SYSTEM)
    rest(before)
    end(before)
    after = bench(tmp_path, key="other")
    answer = after.ask(talk("x", "x"))
    after.run(answer)
    assert cached(answer) == 0
    assert list((tmp_path / "p").glob("*.kv")) == []
    end(after)


def test_an_end_without_rest_writes_what_is_pinned(tmp_path: Path) -> None:
    before = bench(tmp_path)
    pins(before, action="pin", name="a", text=SYSTEM)
    before.run(before.ask(talk("x", "x")))
    end(before)
    assert len(list((tmp_path / "p").glob("*.kv"))) == 1


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_pin_without_room_is_told_once_and_kept_when_there_is(caplog: pytest.LogCaptureFixture) -> None:
    limit = [600]
    one = Bench(max_prefix_bytes=lambda _: limit[0])  # type: ignore[arg-type]
    assert pins(one, action="pin", name="house", text=SYSTEM)[0].problem == ""
    for _ in range(5):
        rest(one)
    (found,) = pins(one)
    assert not found.is_kept
    assert "MiB may be kept; raise engine.max_prefix_bytes, or unpin others" in found.problem
    assert one.engine.stats().pins_with_problem == 1
    assert warnings(caplog) == [f"pin house: {found.problem}"]
    assert one.engine.stats().prompt_tokens_total == found.n_tokens  # it is not computed again and again
    limit[0] = 10**6
    rest(one)
    assert [(p.is_kept, p.problem) for p in pins(one)] == [(True, "")]
    assert one.engine.stats().pins_with_problem == 0
    end(one)


def test_a_pin_that_fits_no_longer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    limit = [10**6]
    one = Bench(max_prefix_bytes=lambda _: limit[0])  # type: ignore[arg-type]
    pins(one, action="pin", name="house", text=SYSTEM)
    rest(one)
    limit[0] = 100
    rest(one)
    (found,) = pins(one)
    assert found.is_kept
    assert "only 0.0 MiB may be kept; raise engine.max_prefix_bytes, or unpin one" in found.problem
    assert warnings(caplog) == [f"pin house: {found.problem}"]
    limit[0] = 10**6
    rest(one)
    assert pins(one)[0].problem == ""
    end(one)


def test_a_pin_that_finds_no_room_on_the_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Bench(disk=PrefixDisk(tmp_path / "p", "k", 300, free_bytes=lambda _: 10**12))
    pins(one, action="pin", name="house", text=SYSTEM)
    rest(one)
    rest(one)
    (found,) = pins(one)
    assert (found.is_kept, found.is_on_disk) == (True, False)
    assert "raise engine.max_prefix_disk_bytes, or unpin others" in found.problem
    assert warnings(caplog) == [f"pin house: {found.problem}"]
    end(one)


def test_a_full_disk_is_told_of_a_pin_and_costs_nothing_else(tmp_path: Path) -> None:
    one = Bench(disk=PrefixDisk(tmp_path / "p", "k", 10**8, free_bytes=lambda _: 0))
    pins(one, action="pin", name="house", text=SYSTEM)
    rest(one)
    assert "cannot be written" in pins(one)[0].problem
    answer = one.ask(talk("x", "x"))
    one.run(answer)
    assert (answer.text, cached(answer) > 0) == ("x", True)
    end(one)


@pytest.mark.parametrize("isolate_prefixes", [False, True])
def test_one_user_cannot_pin_more_than_his_part(tmp_path: Path, isolate_prefixes: bool) -> None:
    settings: dict[str, Any] = {"max_prefix_bytes": 15_000, "isolate_prefixes": isolate_prefixes}
    before = bench(tmp_path, **settings)
    before.run(before.ask(talk("a", "a")))
    before.engine._slots.save_idle(lambda: True)  # what a token takes is known now
    for n in range(3):
        pins(before, action="pin", name=f"a{n}", text=f"{n} {SYSTEM}", tenant="uid:1")
    with pytest.raises(InvalidRequestError, match="the pins of one user may take"):
        pins(before, action="pin", name="a3", text=f"3 {SYSTEM}", tenant="uid:1")
    pins(before, action="pin", name="a2", text=f"4 {SYSTEM}", tenant="uid:1")  # instead of the one it had
    pins(before, action="pin", name="b", text=f"5 {SYSTEM}", tenant="uid:2")
    rest(before)
    end(before)
    after = bench(tmp_path, **settings)
    after.run(after.ask(talk("a", "a")))
    after.engine._slots.save_idle(lambda: True)
    with pytest.raises(InvalidRequestError, match="the pins of one user may take"):
        pins(after, action="pin", name="a3", text=f"3 {SYSTEM}", tenant="uid:1")
    pins(after, action="pin", name="c", text=f"6 {SYSTEM}", tenant="uid:2")
    end(after)


def test_too_many_pins_are_refused(tmp_path: Path) -> None:
    one = bench(tmp_path)
    for number in range(64):
        pins(one, action="pin", name=str(number), text=f"{number} {SYSTEM}")
    with pytest.raises(InvalidRequestError, match="64"):
        pins(one, action="pin", name="more", text=SYSTEM)
    assert isinstance(one.engine.warm.pins(frozenset({""})), Sequence)
    end(one)
