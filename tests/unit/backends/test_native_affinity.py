"""Where the native engine's threads may run, as the kernel tells it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.devices import cpu
from edge_rt.devices.sysfs import parse_cpu_list
from tests.gguf_files import tiny_llama

if isinstance(NativeBackend().probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

MINE = os.sched_getaffinity(0)
if len(MINE) < 2:
    pytest.skip("the process may run on one CPU only", allow_module_level=True)
BIG = max(MINE)


def threads() -> dict[int, set[int]]:
    """Give the CPUs that each thread of the process may run on."""
    found = {}
    for path in Path("/proc/self/task").iterdir():
        lines = (path / "status").read_text().splitlines()
        allowed = next(line for line in lines if line.startswith("Cpus_allowed_list:"))
        found[int(path.name)] = set(parse_cpu_list(allowed.partition(":")[2].strip()))
    return found


@pytest.fixture
def session(tmp_path: Path) -> Iterator[NativeSession]:
    """A model on a machine whose only big core is the last one that this process may use."""
    usable = replace(cpu.usable(), pin_cpus=(BIG,), big_cpus=(BIG, BIG), compute_cpus=(BIG, BIG))
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_llama().encode())
    file = ModelFile(model="tiny", variant="", path=path, quant="")
    session = NativeBackend(lambda: usable).load(file, LoadOptions(n_ctx=4096, n_batch=4096, n_ubatch=512))
    yield session
    session.close()


def test_workers_keep_to_the_big_cores_and_the_caller_stays_free(session: NativeSession) -> None:
    me = threading.get_native_id()
    session.decode([SeqRows(0, 0, [1, 2, 3], True)])
    now = threads()
    assert session.info.n_threads == 2
    assert list(now.values()).count({BIG}) == 1
    assert now[me] == MINE


def test_more_threads_than_big_cores_may_run_anywhere(session: NativeSession) -> None:
    session.set_threads(3)
    assert {BIG} not in threads().values()
    session.set_threads(2)
    assert list(threads().values()).count({BIG}) == 1


def test_the_caller_keeps_to_the_big_cores_while_it_computes(session: NativeSession) -> None:
    seen: set[frozenset[int]] = set()
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        while not done.is_set():
            session.decode([SeqRows(0, 0, [1] * 4000, False)])
            session.seq_trim(0, 0)

    caller = threading.Thread(target=run)
    caller.start()
    try:
        started.wait()
        for _ in range(100_000):
            seen.add(frozenset(threads().get(caller.native_id or 0, set())))
            if frozenset({BIG}) in seen:
                break
    finally:
        done.set()
        caller.join()
    assert frozenset({BIG}) in seen
    assert threads()[threading.get_native_id()] == MINE


def test_cpus_that_the_kernel_refuses_leave_the_threads_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent = 1000
    usable = replace(cpu.usable(), pin_cpus=(absent,), big_cpus=(absent, absent), compute_cpus=(absent, absent))
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_llama().encode())
    session = NativeBackend(lambda: usable).load(
        ModelFile(model="tiny", variant="", path=path, quant=""), LoadOptions(n_ctx=64)
    )
    try:
        assert set(map(frozenset, threads().values())) == {frozenset(MINE)}
        session.decode([SeqRows(0, 0, [1], True)])
    finally:
        session.close()
    assert "not pinned to cpu (1000,)" in caplog.text
