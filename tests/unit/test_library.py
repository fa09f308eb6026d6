"""The library's front door on the null back end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import edge_rt
from edge_rt import config
from edge_rt.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
    ModelNotPulledError,
    OfflineError,
    ShuttingDownError,
)
from edge_rt.library import ChunkStream, Model, _Answer
from edge_rt.power.calibration import write
from edge_rt.power.monitor import EnergyMonitor, Unmeasured
from edge_rt.power.shared import MONITORS
from edge_rt.types import Chunk
from tests.unit.power.test_calibration import FOUND


def settings(**flags: object) -> config.Loaded:
    return config.load(environ={}, flags={"models.null.backend": "null", "models.null.n_ctx": 256, **flags})


@pytest.fixture
def model() -> Iterator[edge_rt.Model]:
    with edge_rt.load("null", settings=settings()) as loaded:
        yield loaded


def test_every_public_name_is_there() -> None:
    for name in edge_rt.__all__:
        assert getattr(edge_rt, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = edge_rt.no_such_name


def test_streams_text_and_then_tells_what_it_took(model: edge_rt.Model) -> None:
    answer = model.generate("hello 漢字")
    assert answer.usage is None
    assert "".join(answer) == "hello 漢字"
    assert answer.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("hello 漢字".encode()) + 1
    assert answer.timings is not None
    assert answer.timings.ttft_s > 0


def test_takes_a_conversation_as_messages_or_mappings(model: edge_rt.Model) -> None:
    turns = [{"role": "user", "content": "first"}, edge_rt.Message(role="user", content="second")]
    assert model.generate(turns).text() == "second"


def test_a_beam_search_gives_its_answers_best_first(model: edge_rt.Model) -> None:
    found = model.beam_search("hello", n_beams=3, n_best=2, length_penalty=0.0)
    assert [len(found), found[0].text] == [2, "hello"]
    assert found[0].score > found[1].score
    with pytest.raises(InvalidRequestError):
        model.beam_search("hello", n_beams=0)


def test_raw_text_is_continued(model: edge_rt.Model) -> None:
    assert len(model.generate("abc", raw=True, max_tokens=5, seed=1).text()) <= 5


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"no_such_field": 1}, "sampling"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_arguments_are_refused_at_once(model: edge_rt.Model, arguments: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model.generate("x", **arguments)  # type: ignore[arg-type]
    assert caught.value.param.startswith(param)


def test_a_message_without_content_is_refused(model: edge_rt.Model) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        model.generate([{"role": "user"}])


def test_errors_of_the_engine_come_from_the_iterator(model: edge_rt.Model) -> None:
    answer = model.generate("x" * 300)
    with pytest.raises(ContextLengthError):
        next(answer)


def test_closing_an_answer_stops_the_engine_working_on_it(model: edge_rt.Model) -> None:
    answer = model.generate("abc", raw=True, stop=["never"], temperature=1.0)
    next(answer)
    answer.close()
    assert model.generate("still there").text() == "still there"
    assert model.stats().running == 0


@pytest.mark.parametrize("how", ["closed", "let go of"])
def test_an_answer_that_nobody_began_to_read_is_cancelled_too(how: str) -> None:
    slow = settings(**{"models.null.variant": "step_s=0.002", "models.null.n_ctx": 4096})
    with edge_rt.load("null", settings=slow) as model:
        answer = model.generate("x" * 3000)
        if how == "closed":
            answer.close()
        del answer
        assert model.generate("next").text() == "next"
        assert (model.stats().running, model.stats().cancelled_total) == (0, 1)


def test_an_answer_that_has_ended_stays_ended(model: edge_rt.Model) -> None:
    answer = model.generate("short")
    assert answer.text() == "short"
    answer.close()
    assert list(answer) == []
    assert model.stats().cancelled_total == 0


def test_threads_share_one_model(model: edge_rt.Model) -> None:
    answers: dict[str, str] = {}

    def ask(text: str) -> None:
        answers[text] = model.generate(text).text()

    threads = [threading.Thread(target=ask, args=(f"thread {i} says {i * i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(asked == answered for asked, answered in answers.items())


def test_a_closed_model_refuses(model: edge_rt.Model) -> None:
    model.close()
    with pytest.raises(ShuttingDownError):
        model.generate("x").text()


def test_a_closed_model_keeps_away_from_the_memory_it_gave_back(model: edge_rt.Model) -> None:
    model.close()
    model.close()
    with pytest.raises(ShuttingDownError):
        model.tokenize("x")
    with pytest.raises(ShuttingDownError):
        model.detokenize([1])
    assert model.stats().running == 0


class LongTokenizing:
    """An engine whose tokenize lasts until it may leave."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.stopped = threading.Event()

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        self.entered.set()
        self.leave.wait()
        return [len(text), special, add_bos]

    def warm_up(self) -> None: ...

    def run(self) -> None:
        self.stopped.wait()

    def stop(self, drain_s: float) -> None:
        assert drain_s == 0.0
        self.stopped.set()


def test_close_waits_for_calls_that_use_the_session_and_frees_it_once(model: edge_rt.Model) -> None:
    engine = LongTokenizing()
    frees: list[bool] = []
    closing = Model(model.info, engine, config.Config(), lambda: frees.append(engine.leave.is_set()))  # type: ignore[arg-type]
    user = threading.Thread(target=closing.tokenize, args=("x",))
    user.start()
    engine.entered.wait()
    closers = [threading.Thread(target=closing.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    engine.stopped.wait()
    engine.leave.set()
    for thread in [user, *closers]:
        thread.join()
    assert frees == [True]


class WatchedQueue(SimpleQueue[Any]):
    def __init__(self) -> None:
        self.reading = threading.Event()

    def get(self, *args: Any) -> Any:
        self.reading.set()
        return super().get(*args)


def test_closing_an_answer_from_another_thread_ends_its_reader() -> None:
    answer = _Answer(Unmeasured())
    answer.items = watched = WatchedQueue()
    stream = ChunkStream(answer, lambda _: None)
    ends: list[list[Chunk]] = []
    reader = threading.Thread(target=lambda: ends.append(list(stream)))
    reader.start()
    watched.reading.wait()
    stream.close()
    reader.join()
    assert ends == [[]]


FORK = """
import os, sys
import edge_rt
from edge_rt import config
from edge_rt.errors import UnsupportedFeatureError
model = edge_rt.load("null", settings=config.load(environ={}, flags={"models.null.backend": "null"}))
if os.fork() == 0:
    try:
        model.generate("x")
    except UnsupportedFeatureError as exc:
        model.close()
        sys.exit(0 if "load it in the child" in str(exc) else 3)
    sys.exit(4)
status = os.waitstatus_to_exitcode(os.wait()[1])
sys.exit(status or model.generate("parent").text() != "parent")
"""
EXIT = """
import edge_rt
from edge_rt import config
settings = config.load(environ={}, flags={"models.null.backend": "null", "models.null.variant": "step_s=0.005"})
model = edge_rt.load("null", settings=settings)
answer = model.generate("abc", raw=True, stop=["never"], temperature=1.0)
next(answer)
print("in the middle")
"""


@pytest.mark.parametrize(("code", "output"), [(FORK, b""), (EXIT, b"in the middle\n")], ids=["fork", "exit"])
def test_a_process_may_fork_and_end_with_a_model_in_use(code: str, output: bytes) -> None:
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, output, b"")


def test_missing_models_are_told_apart(tmp_path: object) -> None:
    with pytest.raises(ModelNotFoundError):
        edge_rt.load("no-such-model", settings=settings())
    for path in ("/no/such/file.gguf", "./file", Path("file")):
        with pytest.raises(ModelFormatError, match="No such file"):
            edge_rt.load(path, settings=settings())
    empty = {"catalog.store_dir": str(tmp_path)}
    with pytest.raises(ModelNotPulledError):
        edge_rt.load("", settings=settings(**empty))
    with pytest.raises(OfflineError):
        edge_rt.load("", settings=settings(**empty, **{"catalog.offline": True}), pull=True)


@pytest.mark.model
def test_the_real_model_answers_greedily_the_same_twice(model_store: object) -> None:
    with edge_rt.load() as loaded:
        first = loaded.generate("Why is the sky blue?", max_tokens=24, temperature=0).text()
        assert loaded.generate("Why is the sky blue?", max_tokens=24, temperature=0).text() == first
        assert len(first.split()) > 8
    with edge_rt.load(str(model_store)) as by_path:
        assert by_path.generate("Why is the sky blue?", max_tokens=24, temperature=0).text() == first


def metered(tmp_path: Path, **flags: object) -> config.Loaded:
    """Settings whose meter is a table of a board, which is everywhere."""
    table = tmp_path / "power.json"
    write(table, FOUND)
    return settings(**{"power.meter": "model", "power.model_file": str(table), **flags})


def test_an_answer_says_what_it_took_and_by_what(tmp_path: Path) -> None:
    slow = {"models.null.variant": "step_s=0.03", "engine.max_draft": 0}
    with edge_rt.load("null", settings=metered(tmp_path, **slow)) as model:
        assert isinstance(model, edge_rt.Model)
        model.generate("the meter sees a load from its second look on").text()
        answer = model.generate("how much does this take?" * 2)
        answer.text()
    assert answer.usage is not None
    energy = answer.usage.energy
    assert energy is not None
    assert (energy.quality, energy.boundary, energy.source) == ("modelled", "board", "model of Board 5")
    assert energy.total_j > 0


def test_models_share_one_monitor_and_the_last_closes_it(tmp_path: Path) -> None:
    loaded = metered(tmp_path)
    first, second = edge_rt.load("null", settings=loaded), edge_rt.load("null", settings=loaded)
    assert first._energy is second._energy
    assert isinstance(first._energy, EnergyMonitor)
    first.close()
    assert [t.name for t in threading.enumerate()].count("edge_rt-meter") == 1
    second.close()
    second.close()
    assert "edge_rt-meter" not in [t.name for t in threading.enumerate()]
    assert not MONITORS._open


def test_an_answer_that_is_given_up_is_not_open_any_more(tmp_path: Path) -> None:
    slow = {"models.null.variant": "step_s=0.01"}
    with edge_rt.load("null", settings=metered(tmp_path, **slow)) as model:
        assert isinstance(model, edge_rt.Model)
        answer = model.generate("a" * 100)
        next(answer)
        answer.close()
        assert isinstance(model._energy, EnergyMonitor)
        assert not model._energy._account.is_busy


def test_a_meter_that_is_none_stops_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"power\.meter"):
        edge_rt.load("null", settings=settings(**{"power.meter": "serial:nothing"}))
    assert not MONITORS._open


def test_answers_of_a_form_and_calls() -> None:
    with edge_rt.load("null", settings=settings(**{"models.null.n_ctx": 2048})) as model:
        _check_form_and_calls(model)


def _check_form_and_calls(model: Any) -> None:
    form = edge_rt.ResponseFormat(kind="choice", text='["yes", "no"]')
    assert model.generate("Well?", response_format=form).text() in ("yes", "no")
    tool = edge_rt.Tool(name="look", parameters='{"type": "object", "properties": {}, "additionalProperties": false}')
    answer = model.generate("Well?", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert answer.text() == ""
    (call,) = answer.tool_calls
    assert (call.name, call.arguments, answer.finish_reason) == ("look", "{}", "tool_calls")
