from __future__ import annotations

import math
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_rt.errors import ConfigError, DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.power import server
from edge_rt.power.client import HintSender, ask
from edge_rt.power.server import Peer, Rights, Server
from edge_rt.power.state import Advice, Hint
from edge_rt.power.wire import TakesAdvice, advice_of, encode, encode_hint, encode_takes_advice, parse
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S, until

HINT = Hint(work="prefill", n_running=1, n_prompt_tokens=40, sent_s=999.0)


@dataclass
class Scene:
    """A server on a real socket whose loop turns when the test says so."""

    path: str
    clock: FakeClock
    selector: selectors.BaseSelector
    rights: Rights = field(default_factory=Rights)
    n_hints: int = 0
    caps: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=lambda: {"state": "acting"})
    uid: int | None = 0  # that the kernel tells of the next client, whoever runs the tests; None: the real one
    server: Server = field(init=False)

    def start(self) -> None:
        listener, is_own = server.listen(self.path, "", {})
        assert is_own
        self.server = Server(
            listener,
            self.selector,
            self.rights,
            lambda: self.answer,
            self._hinted,
            lambda max_w, _: self.caps.append(max_w),
            lambda _, __, text: self.said.append(text),
            self.clock,
            self._peer,
        )

    def _peer(self, sock: socket.socket) -> Peer:
        return server.peer(sock) if self.uid is None else Peer(1, self.uid, frozenset({self.uid}))

    def _hinted(self) -> None:
        self.n_hints += 1

    def turn(self) -> None:
        """Let the loop do all there is to do."""
        while events := self.selector.select(0):
            for key, _ in events:
                key.data()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(self.path)
        return sock

    def send_until_let_go(self, sock: socket.socket, raw: bytes, *, pause_s: float = 0.0) -> int:
        for n_sent in range(10_000):
            try:
                sock.send(raw, socket.MSG_NOSIGNAL)
            except BrokenPipeError:
                return n_sent
            self.clock.advance(pause_s)
            self.turn()
        raise AssertionError("the server bears with anything")

    def say(self, sock: socket.socket, raw: bytes) -> dict[str, Any]:
        sock.send(raw)
        self.turn()
        return parse(sock.recv(5000))


@pytest.fixture
def scene(socket_dir: Path, clock: FakeClock) -> Iterator[Scene]:
    with selectors.DefaultSelector() as selector:
        made = Scene(str(socket_dir / "p"), clock, selector)
        made.start()
        yield made
        made.server.close()


def test_hints_are_kept_by_client_and_end_with_it(scene: Scene) -> None:
    with scene.connect() as a, scene.connect() as b:
        a.send(encode_hint(HINT))
        b.send(encode_hint(Hint(work="decode", sent_s=999.5)))
        a.send(encode_hint(Hint(work="idle", sent_s=999.7)))
        scene.turn()
        assert [hint.work for hint in scene.server.hints()] == ["idle", "decode"]
        assert scene.n_hints == 3
        a.setblocking(False)
        with pytest.raises(BlockingIOError):
            a.recv(100)  # hints have no answer
    scene.turn()
    assert scene.server.hints() == []
    assert scene.n_hints == 5
    assert scene.server.n_clients == 0


def test_status_and_cap(scene: Scene) -> None:
    with scene.connect() as sock:
        assert scene.say(sock, encode("status")) == {"type": "status", "state": "acting"}
        assert scene.say(sock, encode("cap", max_w=12.5)) == {"type": "done"}
    assert scene.caps == [12.5]


def test_nonsense_is_answered_and_after_a_while_not_heard(scene: Scene) -> None:
    with scene.connect() as sock:
        for _ in range(8):
            assert scene.say(sock, b"\xff" * 100)["code"] == "bad_message"
        assert sock.recv(100) == b""
    with scene.connect() as sock:
        assert scene.say(sock, b"{" * 5000)["problem"] == "the message is longer than 4096 bytes"
        assert scene.say(sock, encode("status"))["state"] == "acting"


def test_a_status_that_cannot_be_told_ends_nothing(scene: Scene) -> None:
    with scene.connect() as sock:
        for answer in ({"text": "x" * 5000}, {"power_w": float("nan")}):
            scene.answer = answer
            assert scene.say(sock, encode("status"))["code"] == "internal"


def test_a_hint_from_the_future_counts_not(scene: Scene) -> None:
    with scene.connect() as sock:
        raw = encode_hint(Hint(work="prefill", sent_s=scene.clock() + 5.0))
        assert scene.say(sock, raw)["problem"] == "sent_s lies in the future"
    assert scene.n_hints == 0


def test_an_empty_message_is_the_end(scene: Scene) -> None:
    with scene.connect() as sock:
        sock.send(b"")
        scene.turn()
        assert scene.server.n_clients == 0


@pytest.mark.parametrize("raw", [encode_hint(HINT), encode("status"), b"nonsense"], ids=["hints", "unread", "bad"])
def test_a_new_connection_is_no_new_burst(scene: Scene, raw: bytes) -> None:
    scene.uid, scene.server.rights = 1000, Rights(uids=frozenset({1000}))
    with scene.connect() as sock:
        scene.send_until_let_go(sock, raw)
    with scene.connect() as sock:
        scene.turn()
        assert parse(sock.recv(5000))["problem"].startswith("a program of yours sent too much or nonsense")
    assert scene.server.n_clients == 0
    scene.uid = 1001
    with scene.connect() as sock:
        assert scene.say(sock, encode("status"))["state"] == "acting"
    scene.uid = 1000
    scene.clock.advance(1.0)
    with scene.connect() as sock:
        assert scene.say(sock, encode("status"))["state"] == "acting"


def test_who_sends_too_much_is_let_go(scene: Scene) -> None:
    with scene.connect() as sock:
        n_sent = scene.send_until_let_go(sock, encode_hint(HINT))
        assert scene.n_hints < 250 < n_sent + 50
    assert scene.said == ["process 1 sends too much and is let go"]
    scene.clock.advance(1.0)
    with scene.connect() as sock:
        for _ in range(1000):
            sock.send(encode_hint(HINT))
            scene.clock.advance(0.02)
            scene.turn()
        assert scene.server.n_clients == 1


def test_who_does_not_read_is_let_go(scene: Scene) -> None:
    scene.answer = {"text": "x" * 4000}
    with scene.connect() as sock:
        assert scene.send_until_let_go(sock, encode("status"), pause_s=1.0) < 10_000
        assert scene.server.n_clients == 0


def test_one_client_cannot_keep_the_loop_to_itself(scene: Scene) -> None:
    with scene.connect() as busy, scene.connect() as other:
        for _ in range(60):
            busy.send(encode_hint(HINT))
        other.send(encode("status"))
        for _ in range(2):  # one turn to accept, one for each to be heard
            for key, _ in scene.selector.select(0):
                key.data()
        assert scene.n_hints <= 32
        assert parse(other.recv(5000))["type"] == "status"


def test_a_storm_of_connects_is_let_in_at_a_rate_and_others_are_heard(scene: Scene) -> None:
    with scene.connect() as steady:
        scene.turn()
        scene.uid = 1234
        n_refused = 0
        for _ in range(400):
            with scene.connect() as sock:
                scene.turn()
                sock.setblocking(False)
                with suppress(BlockingIOError):
                    n_refused += parse(sock.recv(5000))["code"] == "busy"
            if scene.server.resume_s < math.inf:
                break
        assert n_refused > 0
        assert scene.said == ["processes of user 1234 connect too often, 1 the last"] * n_refused
        # What has connected goes on, and a loop that turns has nothing to do but that.
        assert scene.say(steady, encode("status"))["state"] == "acting"
        with scene.connect() as waits:
            scene.turn()
            n_clients = scene.server.n_clients
            scene.uid = 77
            scene.clock.advance(0.06)
            scene.server.resume(scene.clock())
            scene.turn()
            assert scene.server.n_clients == n_clients + 1
            assert scene.server.resume_s == math.inf
            assert scene.say(waits, encode("status"))["state"] == "acting"


def test_a_user_who_connects_now_and_then_is_not_in_a_storm(scene: Scene) -> None:
    scene.uid = 1234
    for _ in range(300):
        with scene.connect() as sock:
            assert scene.say(sock, encode("status"))["state"] == "acting"
        scene.clock.advance(0.05)
    assert scene.said == []


def test_a_question_waits_in_line(scene: Scene) -> None:
    """With a full backlog a connect that does not wait fails at once."""
    with ExitStack() as line:
        while True:
            sock = line.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            try:
                sock.connect(scene.path)
            except BlockingIOError:
                break
        with pytest.raises(DaemonUnreachableError):
            ask(scene.path, "status", timeout_s=0.01)
        told: list[Any] = []
        asking = threading.Thread(target=lambda: told.append(ask(scene.path, "status", timeout_s=PATIENCE_S)))
        asking.start()
        until(lambda: scene.turn() or told)
        asking.join()
    assert told[0]["state"] == "acting"


def test_who_is_refused_before_it_was_heard_hears_why(scene: Scene) -> None:
    scene.uid = 1234
    scene.server._barred_s[1234] = scene.clock()
    told: list[str] = []

    def question() -> None:
        with pytest.raises(InvalidRequestError) as caught:
            ask(scene.path, "status", timeout_s=PATIENCE_S)
        told.append(caught.value.problem)

    asking = threading.Thread(target=question)
    asking.start()
    until(lambda: scene.turn() or told)
    asking.join()
    assert "sent too much or nonsense" in told[0]


def test_clients_of_others_are_counted_and_roots_always_heard(scene: Scene) -> None:
    scene.uid = 1000
    socks = [scene.connect() for _ in range(9)]
    scene.turn()
    assert scene.server.n_clients == 8
    assert parse(socks[-1].recv(5000))["code"] == "busy"
    scene.uid = 0
    with scene.connect() as root:
        assert scene.say(root, encode("status"))["state"] == "acting"
    scene.turn()
    for _ in range(33):
        socks.append(scene.connect())
        scene.turn()
    assert scene.server.n_clients == 8 + 32
    assert parse(socks[-1].recv(5000))["code"] == "busy"
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("peer", "may_hint", "may_cap"),
    [
        (Peer(1, 0, frozenset({0})), True, True),
        (Peer(1, 900, frozenset()), True, False),
        (Peer(1, 1000, frozenset({7})), True, False),
        (Peer(1, 1000, frozenset({8})), False, True),
        (Peer(1, 1000, frozenset({9})), False, False),
    ],
)
def test_who_may_do_what(peer: Peer, may_hint: bool, may_cap: bool) -> None:
    rights = Rights(uids=frozenset({900}), gids=frozenset({7}), cap_gid=8)
    assert (rights.may_hint(peer), rights.may_cap(peer)) == (may_hint, may_cap)
    assert not Rights().may_cap(Peer(1, 1000, frozenset({0})))


def test_who_may_not_hears_why(scene: Scene) -> None:
    scene.uid = 1000
    scene.server.rights = Rights()
    with scene.connect() as sock:
        assert scene.say(sock, encode("cap", max_w=1))["code"] == "denied"
        assert scene.say(sock, encode("status"))["state"] == "acting"
        assert scene.say(sock, encode_hint(HINT))["code"] == "denied"
        assert sock.recv(100) == b""
    assert scene.caps == []
    assert scene.server.hints() == []


def test_the_kernel_tells_who_it_is() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        found = server.peer(a)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert found.gids == {os.getegid(), *os.getgroups()}


def test_groups_that_are_not_there() -> None:
    found = server.rights("no-such-group", "")
    assert found.gids == {os.getegid()} - {0}
    assert found.cap_gid is None
    assert server.rights("root", "root").cap_gid == 0
    with pytest.raises(ConfigError, match=r"power\.cap_group: no such group"):
        server.rights("", "no-such-group")


# The socket.


def test_the_socket_is_for_owner_and_group(scene: Scene) -> None:
    assert Path(scene.path).stat().st_mode & 0o777 == 0o660


def test_a_live_socket_is_not_taken_and_a_stale_one_is(scene: Scene, socket_dir: Path) -> None:
    with pytest.raises(ConfigError, match="another powerd"):
        server.listen(scene.path, "", {})
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(socket_dir / "stale"))
    stale.close()
    fresh, _ = server.listen(str(socket_dir / "stale"), "", {})
    fresh.close()


def test_no_other_file_is_replaced(socket_dir: Path) -> None:
    (socket_dir / "file").write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        server.listen(str(socket_dir / "file"), "", {})
    assert (socket_dir / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be bound"):
        server.listen(str(socket_dir / "file/p"), "", {})
    with pytest.raises(ConfigError, match="107 bytes"):
        server.listen("/" + "x" * 200, "", {})


def test_systemds_socket_is_taken_over(socket_dir: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(socket_dir / "p"))
    listener.listen()
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    found, is_own = server.listen("/nowhere/p", "", environ, first_fd=listener.detach())
    with found:
        assert not is_own
        assert found.getsockname() == str(socket_dir / "p")
        assert not found.get_inheritable()
    with pytest.raises(ConfigError, match="must be 1"):
        server.listen("/nowhere/p", "", environ | {"LISTEN_FDS": "2"})


def test_another_kind_of_socket_is_not_taken_over() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        with pytest.raises(ConfigError, match="SOCK_SEQPACKET"):
            server.listen("/nowhere/p", "", environ, first_fd=os.dup(stream.fileno()))


# The clients.


def test_without_powerd_hints_are_dropped_and_connects_are_few(socket_dir: Path, clock: FakeClock) -> None:
    sender = HintSender(str(socket_dir / "p"), clock)
    problems = []
    for _ in range(1200):  # 10 minutes
        assert not sender.send(HINT)
        problems.append(sender._retry_s)
        clock.advance(0.5)
    assert 20 <= len(set(problems)) <= 30
    assert "No such file" in sender.problem
    assert sender.n_dropped == 1200


def test_a_powerd_that_comes_is_found_and_one_that_goes_is_missed(scene: Scene, clock: FakeClock) -> None:
    sender = HintSender(scene.path, clock)
    assert sender.send(HINT)
    scene.turn()
    assert scene.server.hints() == [HINT]
    scene.server.close()
    clock.advance(60)
    assert not sender.send(HINT)
    Path(scene.path).unlink()
    scene.start()
    assert not sender.send(HINT)  # not at once
    clock.advance(0.6)
    assert sender.send(HINT)
    scene.turn()
    assert scene.server.hints() == [HINT]
    sender.close()


def test_a_powerd_that_does_not_keep_up_loses_hints_and_nothing_waits(scene: Scene, clock: FakeClock) -> None:
    sender = HintSender(scene.path, clock)
    n_sent = sum(sender.send(HINT) for _ in range(5000))
    assert 0 < n_sent < 5000
    assert sender.problem == "powerd does not keep up"
    sender.close()


def test_a_sender_that_may_not_hears_why_and_asks_seldom(scene: Scene, clock: FakeClock) -> None:
    scene.uid = 1000
    scene.server.rights = Rights()
    sender = HintSender(scene.path, clock)
    n_sent = 0
    for _ in range(600):
        n_sent += sender.send(HINT)
        scene.turn()
        clock.advance(0.1)
    assert n_sent <= 8
    assert sender.problem == "hints come from power.socket_group or root"
    sender.close()


def test_a_question_and_its_answer(scene: Scene) -> None:
    import threading

    answers: list[Any] = []

    def question(kind: str, **values: Any) -> None:
        try:
            answers.append(ask(scene.path, kind, timeout_s=10, **values))
        except (InvalidRequestError, DaemonLostError) as exc:
            answers.append(exc)

    for kind, values in (("status", {}), ("cap", {"max_w": 5.0}), ("cap", {"max_w": -5.0})):
        thread = threading.Thread(target=question, args=(kind,), kwargs=values)
        thread.start()
        while thread.is_alive():
            scene.turn()
        thread.join()
    assert answers[0]["state"] == "acting"
    assert answers[1] == {"type": "done"}
    assert isinstance(answers[2], InvalidRequestError)
    assert "max_w is not from 0 to 10000" in str(answers[2])


def test_nobody_there(socket_dir: Path) -> None:
    with pytest.raises(DaemonUnreachableError, match=r"start edge_rt-powerd\.service"):
        ask(str(socket_dir / "p"), "status")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(str(socket_dir / "p"))
        listener.listen()
        with pytest.raises(DaemonLostError):
            ask(str(socket_dir / "p"), "status", timeout_s=0.01)


# -- advice ----------------------------------------------------------------------------------------------------------

ADVICE = Advice(n_prefill_threads=4, n_decode_threads=2, max_batch=6)
TAKES = encode_takes_advice(TakesAdvice(4, 8))


def _told(sock: socket.socket) -> list[tuple[Advice, bool]]:
    """Read all advice that is there."""
    sock.setblocking(False)
    found = []
    while True:
        try:
            found.append(advice_of(parse(sock.recv(5000))))
        except BlockingIOError:
            return found


def test_advice_goes_to_who_takes_it_when_it_changes(scene: Scene) -> None:
    with scene.connect() as takes, scene.connect() as other:
        takes.send(TAKES)
        other.send(encode_hint(HINT))
        scene.turn()
        for advice in (ADVICE, ADVICE, Advice()):
            scene.server.advise(advice, is_dry=False, now_s=scene.clock())
        scene.server.advise(Advice(), is_dry=True, now_s=scene.clock())
        assert _told(takes) == [(ADVICE, False), (Advice(), False), (Advice(), True)]
        assert _told(other) == []


def test_advice_is_repeated_while_the_client_works_and_not_while_it_rests(scene: Scene) -> None:
    with scene.connect() as sock:
        sock.send(TAKES)
        for work, n_told in (("idle", 1), ("decode", 5)):
            sock.send(encode_hint(Hint(work=work, sent_s=scene.clock())))  # type: ignore[arg-type]
            scene.turn()
            for _ in range(50):
                scene.server.advise(ADVICE, is_dry=False, now_s=scene.clock())
                scene.clock.advance(0.1)
            assert len(_told(sock)) == n_told


def test_hints_bear_the_limits_within_which_advice_is_taken(scene: Scene) -> None:
    with scene.connect() as sock:
        sock.send(encode_hint(HINT))
        sock.send(TAKES)
        scene.turn()
        assert [(hint.max_threads, hint.max_batch) for hint in scene.server.hints()] == [(4, 8)]
        sock.send(encode_hint(HINT))
        scene.turn()
        assert [(hint.max_threads, hint.max_batch) for hint in scene.server.hints()] == [(4, 8)]


def test_advice_of_another_version_is_refused_and_hints_still_count(scene: Scene) -> None:
    with scene.connect() as sock:
        raw = encode("takes_advice", version=2, max_threads=4, max_batch=8)
        assert scene.say(sock, raw)["code"] == "bad_message"
        sock.send(encode_hint(HINT))
        scene.turn()
        assert scene.server.hints() == [HINT]
        scene.server.advise(ADVICE, is_dry=False, now_s=scene.clock())
        assert _told(sock) == []


def test_who_may_give_no_hints_gets_no_advice(scene: Scene) -> None:
    scene.uid = 12345
    with scene.connect() as sock:
        assert scene.say(sock, TAKES)["code"] == "denied"
        scene.server.advise(ADVICE, is_dry=False, now_s=scene.clock())
        assert _told(sock) == []


def test_who_does_not_read_its_advice_is_let_go(scene: Scene) -> None:
    with scene.connect() as sock:
        sock.send(TAKES)
        scene.turn()
        for i in range(10_000):
            scene.server.advise(Advice(max_batch=1 + i % 2), is_dry=False, now_s=scene.clock())
            if not scene.server.n_clients:
                break
        assert scene.server.n_clients == 0
