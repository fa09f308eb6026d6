"""Grammars that take too much are ended in the child that tries them, and what it says of the others is what holds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.null import NullBackend, NullSession
from edge_rt.engine import grammar_text, grammar_trial
from edge_rt.engine.grammar import Constraint, Grammars
from edge_rt.engine.grammar_trial import Trial, Trials
from edge_rt.errors import BackendStepError, EdgeRtError, GrammarsFullError, InvalidRequestError
from edge_rt.types import ResponseFormat


@pytest.fixture
def session() -> Iterator[NullSession]:
    file = ModelFile(model="m", variant="", path=Path("-"), quant="")
    loaded = NullBackend().load(file, LoadOptions(n_ctx=64))
    yield loaded
    loaded.close()


@pytest.fixture
def trials() -> Iterator[Trials]:
    made = Trials()
    yield made
    made.close()


def schema(**keywords: object) -> str:
    return grammar_text.of_format(ResponseFormat(kind="json_schema", text=json.dumps(keywords)))


# Each pattern alone is harmless; of what all of them match together the library makes automata without end.
ENDLESS = schema(allOf=[{"type": "string", "pattern": f".*{a}{b}.*"} for a in "abcdefghij" for b in "klmnopqrst"])


def test_an_ordinary_grammar_passes_and_is_weighed(trials: Trials) -> None:
    small, large = trials.compile(schema(type="integer")), trials.compile(schema(enum=[f"{i:09}" for i in range(4000)]))
    assert (small.problem, small.limit) == (large.problem, large.limit) == ("", "")
    assert 10_000 < small.n_bytes < 500_000 < large.n_bytes < 20_000_000


def test_what_takes_too_long_is_ended_and_named() -> None:
    trials = Trials(max_s=0.05)
    try:
        assert trials.compile(ENDLESS) == Trial(limit="0.05 s of computing")
        assert trials.compile(schema(type="integer")).n_bytes > 0  # another child
    finally:
        trials.close()


def test_what_takes_too_much_memory_is_ended_and_named() -> None:
    trials = Trials(max_s=20.0, max_bytes=16 * 2**20)
    try:
        assert trials.compile(ENDLESS) == Trial(limit="16 MiB of memory")
    finally:
        trials.close()


def test_a_child_that_is_gone_is_started_again(trials: Trials) -> None:
    trials.compile(schema(type="integer"))
    process = trials._process
    assert process is not None
    process.terminate()  # from outside: no limit of ours
    process.wait()
    assert trials.compile(schema(type="integer")).limit == ""


def first_running(script: str) -> Callable[[Sequence[str]], subprocess.Popen[bytes]]:
    """Start another child the first time."""
    commands = [["sh", "-c", script]]

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(commands.pop() if commands else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "HUP"])
def test_a_child_that_somebody_kills_is_no_fault_of_the_grammar(name: str) -> None:
    trials = Trials(start=first_running(f"head -c 4 > /dev/null; kill -{name} $$"))
    try:
        assert trials.compile(schema(type="integer")).n_bytes > 0
    finally:
        trials.close()


@pytest.mark.parametrize("name", ["ABRT", "BUS", "SEGV"])
def test_a_child_that_breaks_has_met_the_limit_of_memory(name: str) -> None:
    trials = Trials(start=first_running(f"ulimit -c 0; head -c 4 > /dev/null; kill -{name} $$"))
    try:
        assert trials.compile(schema(type="integer")) == Trial(limit="256 MiB of memory")
    finally:
        trials.close()


def test_a_machine_that_leaves_no_time_is_told_and_the_grammar_tried_again(session: NullSession) -> None:
    started = []

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(command)
        return subprocess.Popen(["sh", "-c", "cat > /dev/null"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    grammars = Grammars(session, trials=Trials(max_wait_s=0.05, start=start))
    for _ in range(2):
        error = error_of(grammars)
        assert isinstance(error, BackendStepError)
        assert "got no time to in 0.05 s; try again later" in str(error)
    assert len(started) == 2


def test_no_child_at_all_is_no_fault_of_the_grammar() -> None:
    def missing(command: object) -> subprocess.Popen[bytes]:
        raise FileNotFoundError(str(command)[:20])

    def broken(command: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["false"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    for start in (missing, broken):
        with pytest.raises(BackendStepError, match="the process that compiles grammars"):
            Trials(start=start).compile(schema(type="integer"))


def test_what_is_wrong_is_the_librarys_to_say(trials: Trials) -> None:
    assert "unclosed group" in trials.compile(schema(type="string", pattern="((")).problem


class Told(Trials):
    """Trials whose outcome a test says; counts what is asked."""

    def __init__(self, *told: Trial) -> None:
        super().__init__()
        self.told, self.n_asked = list(told), 0

    def prepare(self) -> None:
        pass

    def compile(self, text: str) -> Trial:
        self.n_asked += 1
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]


def error_of(grammars: Grammars, text: str = 'start: "a"', **fields: str) -> EdgeRtError:
    with pytest.raises(EdgeRtError) as caught:
        grammars.compile(text, "regex", **fields)
    return caught.value


def test_a_limit_is_said_and_the_grammar_not_tried_again(session: NullSession) -> None:
    trials = Told(Trial(limit="1 s of computing"))
    grammars = Grammars(session, trials=trials)
    errors = [error_of(grammars) for _ in range(3)]
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert str(errors[0]) == "regex: takes more than 1 s of computing to compile, which is the limit; simplify it"
    assert trials.n_asked == 1


def test_a_grammar_that_is_too_large_compiled_is_refused(session: NullSession) -> None:
    error = error_of(Grammars(session, trials=Told(Trial(n_bytes=20 * 2**20))))
    assert str(error) == "regex: takes 20 MiB once it is compiled, the limit is 16 MiB; simplify it"


def test_a_grammar_is_tried_once_a_tenant(session: NullSession) -> None:
    trials = Told(Trial(n_bytes=1000))
    grammars = Grammars(session, trials=trials)
    for tenant in ("1000", "1000", "1001", "1000"):
        grammars.compile('start: "a"', "regex", tenant=tenant)
    assert trials.n_asked == 2


def test_one_tenants_unfinished_requests_use_so_much_and_no_more(session: NullSession) -> None:
    grammars = Grammars(session, trials=Told(Trial(n_bytes=400)), max_used_bytes=1000)

    def compiled(text: str, tenant: str = "1000") -> Constraint:
        return grammars.compile(f'start: "{text}"', "regex", tenant=tenant)

    held = [compiled("a"), compiled("a"), compiled("b")]  # the first two share their grammar
    error = error_of(grammars, 'start: "c"', tenant="1000")
    assert isinstance(error, GrammarsFullError)
    assert (error.needed_bytes, error.used_bytes, error.limit_bytes) == (400, 800, 1000)
    compiled("c", "1001")  # another's are his own
    del held[0]
    assert isinstance(error_of(grammars, 'start: "c"', tenant="1000"), GrammarsFullError)
    del held[0]
    compiled("c")  # the answers with the first grammar are over


def test_a_grammar_that_has_grown_with_its_answers_is_compiled_anew(session: NullSession) -> None:
    """What it learns of tokens stays with the compiled grammar, up to the limit of its states: then all fail."""
    trials = Told(Trial(n_bytes=400))
    grammars = Grammars(session, trials=trials, max_kept_bytes=64 * 2**20)
    text = grammar_text.of_format(ResponseFormat(kind="regex", text=r"(a|b)*a(a|b){12}"))  # has 8192 states
    n_bytes = []
    for first in range(20):
        answer = grammars.compile(text, "regex")
        n_bytes.append(grammars.kept_bytes)
        for byte in Random(first).choices(b"ab", k=120):
            answer.mask()
            answer.take(byte, forces=False)
        del answer
    assert n_bytes[1] > n_bytes[0] + 10_000
    assert max(n_bytes) < 64 * 2**20 // 4
    assert trials.n_asked > 1


def test_the_same_answer_again_grows_nothing(session: NullSession) -> None:
    trials = Told(Trial(n_bytes=400))
    grammars = Grammars(session, trials=trials)
    text = grammar_text.of_format(ResponseFormat(kind="regex", text=r"[\p{L}\p{N}]{1,400}"))
    for _ in range(200):
        answer = grammars.compile(text, "regex")
        for byte in "日本語テキスト".encode():
            answer.mask()
            answer.take(byte, forces=False)
        del answer
    assert grammars.kept_bytes > 100_000  # the first answer's growth
    assert trials.n_asked == 1


class Encoded(str):
    """A text that counts how often it is encoded."""

    __slots__ = ()
    n_times: ClassVar[int] = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        Encoded.n_times += 1
        return super().encode(encoding, errors)


def test_a_grammar_is_hashed_once(session: NullSession) -> None:
    Grammars(session, trials=Told(Trial(n_bytes=400))).compile(Encoded('start: "a"'), "regex")
    assert Encoded.n_times == 1


def test_answers_that_have_ended_are_settled_when_the_bytes_are_asked_for(session: NullSession) -> None:
    grammars = Grammars(session, trials=Told(Trial(n_bytes=400)))
    answers = [grammars.compile(f'start: "{text}"', "regex", tenant=tenant) for text, tenant in ("ax", "bx", "ay")]
    assert grammars._used_bytes == {"x": 800, "y": 400}
    del answers[0]
    n_bytes = grammars.kept_bytes
    assert grammars._used_bytes == {"x": 400, "y": 400}
    answers.clear()
    assert grammars.kept_bytes == n_bytes
    assert grammars._used_bytes == {}
    assert grammars._ended.empty()


def test_all_of_a_process_have_one_child() -> None:
    assert grammar_trial.shared() is grammar_trial.shared()
