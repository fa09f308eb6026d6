"""Host processes that answer, crash, hang, lie and are killed. Real processes, and a driver that plays the vendor's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_rt.backends.npu import host
from edge_rt.backends.npu.client import Client, HostAnswerError
from edge_rt.errors import AcceleratorLostError
from tests.npu.fake_npu import DRIVER, FakeNpu, is_alive

pytestmark = pytest.mark.stub
SIZES = ",".join(["2147483647"] * 10_000)


@pytest.fixture
def npu(tmp_path: Path) -> FakeNpu:
    return FakeNpu(tmp_path)


@pytest.fixture
def client(npu: FakeNpu) -> Iterator[Client]:
    made = Client("npu_fake", DRIVER, ["env", f"FAKE_NPU={npu.folder}", sys.executable])
    yield made
    made.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(2_000_000, dtype=np.int64)[::-2],
        np.zeros((0, 7), np.uint8),
        np.array(5, np.int16),
        np.ones((2, 3), ">f4"),
        np.full((300, 300), 7, np.uint8).T,
    ],
)
def test_arrays_come_back_whatever_their_size_and_layout(client: Client, array: np.ndarray) -> None:
    for _ in range(2):
        _, given, took_s = client.call("run", {"outputs": ["y"]}, {"x": array}, timeout_s=20)
        np.testing.assert_array_equal(given["y"], array * 2)
        assert (given["y"].shape, given["y"].dtype) == (array.shape, array.dtype.newbyteorder("="))
        given["y"][...] = 0  # it is the caller's
        assert took_s >= 0


def test_shared_memory_grows_from_call_to_call(client: Client) -> None:
    for n in (5000, 50_000, 10_000, 800_000):
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_array_equal(client.call("run", {"outputs": ["y"]}, {"x": x}, timeout_s=20)[1]["y"], x * 2)


@pytest.mark.parametrize(("how", "kind"), [("memory", "memory"), ("absent", "absent"), ("no such layer", "failed")])
def test_what_a_driver_raises_is_an_answer_and_the_host_goes_on(
    npu: FakeNpu, client: Client, how: str, kind: str
) -> None:
    npu.breaks("telemetry", how)
    with pytest.raises(HostAnswerError) as told:
        client.call("telemetry", {}, timeout_s=20)
    assert told.value.kind == kind
    pid = client.pid
    npu.works("telemetry")
    assert client.call("telemetry", {}, timeout_s=20)[0]["power_w"] == 1.5
    assert client.pid == pid


def test_a_drivers_words_are_no_commands_to_a_terminal(npu: FakeNpu, client: Client) -> None:
    npu.breaks("telemetry", "\x1b[2Jno such layer")
    with pytest.raises(HostAnswerError, match=r"^RuntimeError: \?\[2Jno such layer$"):
        client.call("telemetry", {}, timeout_s=20)


def test_a_call_that_is_none_is_refused(client: Client) -> None:
    with pytest.raises(HostAnswerError, match="no such call: __init__"):
        client.call("__init__", {}, timeout_s=20)


@pytest.mark.parametrize(
    ("call", "how", "words"),
    [
        ("import", "die", "its process ended with SIGSEGV: segmentation violation in libFake.so"),
        ("probe", "die", "its process ended with SIGSEGV"),
        ("probe", "exit", "its process ended with exit status 3"),
    ],
)
def test_a_host_that_dies_is_told_with_its_last_words(
    npu: FakeNpu, client: Client, call: str, how: str, words: str
) -> None:
    npu.breaks(call, how)
    with pytest.raises(AcceleratorLostError) as lost:
        client.call("probe", {}, timeout_s=20)
    assert words in lost.value.reason
    assert client.pid is None
    npu.works(call)
    assert client.call("probe", {}, timeout_s=20)[0]["devices"]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_a_vendors_code_has_started_ends_with_its_host(npu: FakeNpu, client: Client, end: str) -> None:
    threads = threading.active_count()
    npu.breaks("server", "")
    client.call("telemetry", {}, timeout_s=20)
    server = psutil.Process(int((npu.folder / "server").read_text()))
    if end == "kill":
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(AcceleratorLostError, match="SIGKILL"):
            client.call("telemetry", {}, timeout_s=20)
    else:
        client.close()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert threading.active_count() == threads


def test_a_host_that_is_stopped_ends_with_a_worker_that_is_killed(npu: FakeNpu) -> None:
    npu.breaks("server", "")
    code = (
        "import os, signal, sys; from pathlib import Path; from edge_rt.backends.npu.client import Client; "
        "made = Client('npu_fake', Path(sys.argv[1]), ['env', 'FAKE_NPU=' + sys.argv[2], sys.executable]); "
        "made.call('telemetry', {}, timeout_s=20); os.kill(made.pid, signal.SIGSTOP); print(made.pid, flush=True); "
        "signal.pause()"
    )
    command = [sys.executable, "-c", code, str(DRIVER), str(npu.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as worker:
        assert worker.stdout is not None
        started = [
            psutil.Process(int(worker.stdout.readline())),
            psutil.Process(int((npu.folder / "server").read_text())),
        ]
        os.killpg(worker.pid, signal.SIGKILL)
    psutil.wait_procs(started, timeout=10)
    assert all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in started)


def test_a_host_that_hangs_is_ended_when_its_time_is_over(npu: FakeNpu, client: Client) -> None:
    client.call("telemetry", {}, timeout_s=20)
    pid = client.pid
    assert pid is not None
    npu.breaks("probe", "hang")
    with pytest.raises(AcceleratorLostError, match=r"did not answer probe within 0\.2 s"):
        client.call("probe", {}, timeout_s=0.2)
    assert not is_alive(pid)


def test_a_host_that_is_killed_between_two_calls_is_lost(npu: FakeNpu, client: Client) -> None:
    client.call("telemetry", {}, timeout_s=20)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(AcceleratorLostError, match="SIGKILL"):
        client.call("telemetry", {}, timeout_s=20)


def test_what_a_library_prints_is_no_answer(npu: FakeNpu, client: Client, tmp_path: Path) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text("print('QNN v2' * 50000)\nclass Driver:\n    def probe(self): print('x'); return 1\n")
    talking = Client("npu_fake", chatty, [sys.executable])
    assert talking.call("probe", {}, timeout_s=20)[0] == 1
    talking.close()


def test_an_interpreter_that_is_not_there_is_told() -> None:
    with pytest.raises(AcceleratorLostError, match="cannot be started"):
        Client("npu_fake", DRIVER, ["/nowhere/python"]).call("probe", {}, timeout_s=20)


@pytest.mark.parametrize(
    "script",
    [
        "import os; os.write(1, b'garbage' * 10); input()",
        "import os, struct; os.write(1, struct.pack('<4sII', b'enp1', 2**31, 0)); input()",
        'import os, struct; t = b\'{"id": 9, "arrays": []}\'; '
        "os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()",
        'import os, struct; t = b\'{"id": 1, "result": 1, "took_s": 0, "arrays": '
        '[{"name": "y", "dtype": "<f4", "shape": [9], "at": 123456}]}\'; '
        "os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()",
        'import os, struct; t = b\'{"id": 1, "result": 1, "took_s": 0, "arrays": '
        '[{"name": "y", "dtype": "|O8", "shape": [9]}]}\'; '
        "os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()",
        *(
            f"import os, struct; t = {text.encode()!r}; "
            "os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()"
            for text in (
                '{"id": 1, "result": 1, "took_s": "long", "arrays": []}',
                '{"id": 1, "result": 1, "took_s": NaN, "arrays": []}',
                '{"id": 1, "result": 1, "took_s": -1, "arrays": []}',
                f'{{"id": 1, "result": 1, "took_s": 1{"0" * 400}, "arrays": []}}',
                '{"id": 1, "error": "no", "arrays": []}',
                # Sizes that take hours to multiply, and arrays that together have more bytes than may be sent
                f'{{"id": 1, "arrays": [{{"name": "y", "dtype": "<f4", "shape": [{SIZES}]}}]}}',
            )
        ),
        "import os, struct, sys; os.ftruncate(int(sys.argv[-2]), 2**20); "
        'a = b\'{"name": "y", "dtype": "|u1", "shape": [1048576], "at": 0}\'; '
        't = b\'{"id": 1, "result": 1, "took_s": 0, "arrays": [\' + b\',\'.join([a] * 1025) + b\']}\'; '
        "os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()",
        "import os, struct; t = b'['*100000; os.write(1, struct.pack('<4sII', b'enp1', len(t), 0) + t); input()",
    ],
)
def test_a_peer_that_does_not_keep_to_the_protocol_is_ended(script: str) -> None:
    lying = Client("npu_fake", DRIVER, [sys.executable, "-c", script])
    with pytest.raises(AcceleratorLostError, match="protocol"):
        lying.call("probe", {}, timeout_s=20)
    assert lying.pid is None


def test_arrays_that_cannot_be_sent_are_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        client.call("run", {"outputs": []}, {"x": np.array([b"a"], object)}, timeout_s=20)
    assert client.call("probe", {}, timeout_s=20)[0]["devices"]


def test_the_other_side_cannot_make_shared_memory_smaller(client: Client) -> None:
    client.call("probe", {}, timeout_s=20)
    for fd in client._fds[:2]:
        os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_the_host_needs_nothing_of_edge_rt() -> None:
    source = Path(host.__file__).read_text()
    assert "edge_rt" not in source


def test_a_host_that_is_started_ahead_imports_before_it_is_asked(npu: FakeNpu, client: Client) -> None:
    client.start()
    pid = client.pid
    assert client.call("telemetry", {}, timeout_s=20)[0]["power_w"] == 1.5
    assert client.pid == pid
    assert npu.calls() == ["import", "preload", "telemetry"]


@pytest.mark.parametrize("how", ["no such library", "exit", "die"])
def test_what_fails_ahead_is_told_by_the_first_call(npu: FakeNpu, client: Client, how: str) -> None:
    npu.breaks("import", how)
    client.start()
    with pytest.raises((HostAnswerError, AcceleratorLostError)):
        client.call("telemetry", {}, timeout_s=20)
