from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.tensor_types import DeviceState
from edge_rt.worker.probe import MAX_OUTPUT_BYTES, ProbeChild, absent, probe, survey
from tests.patience import PATIENCE_S, until


def run(code: str, timeout_s: float = PATIENCE_S) -> tuple[DeviceState, ...]:
    return asyncio.run(probe("vendor", timeout_s=timeout_s, command=(sys.executable, "-c", code)))


def test_a_back_end_tells_its_devices_from_its_own_process() -> None:
    (device,) = asyncio.run(probe("null"))
    assert (device.place, device.kind, device.simulated, device.fault) == ("null:null", "null", True, "")


def test_an_unknown_back_end_is_absent_with_the_reason() -> None:
    (device,) = asyncio.run(probe("no_such"))
    assert "no such back end" in device.fault


def test_a_setting_that_is_none_is_told_as_that_and_not_as_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "config.toml"
    bad.write_text("[npu]\nserial_ports = 5\n")
    monkeypatch.setenv("EDGE_RT_CONFIG", str(bad))
    (device,) = asyncio.run(probe("npu_serial"))
    assert device.kind == "none"
    assert "npu.serial_ports: Expected `array`, got 5" in device.fault


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import os; os.abort()", "signal 6"),
        ("raise SystemExit(3)", "exit status 3"),
        ("print('a library says hello')", "cannot be read"),
        ("print('[]')", "no device"),
        ('print(\'[{"backend": "other", "id": "0", "kind": "npu"}]\')', "no device"),
        (f"print('x' * {MAX_OUTPUT_BYTES * 3})", "cannot be read"),
    ],
)
def test_what_a_vendors_library_does_to_its_process_is_a_fault_of_its_device(code: str, fault: str) -> None:
    (device,) = run(code)
    assert fault in device.fault


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'written')!r}, 'w').write(str(child.pid))\n"
        f"import os; os.rename({str(tmp_path / 'written')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)\n"
    )
    for timeout_s in (1.0, 4.0, 16.0, PATIENCE_S):  # until the time was enough for it to start the other
        (device,) = run(code, timeout_s=timeout_s)
        assert f"did not answer within {timeout_s:g} s" in device.fault
        if (tmp_path / "pid").exists():
            break
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")

    def has_ended() -> bool:
        try:
            return status.read_text().split()[2] in "ZX"
        except OSError:
            return True

    until(has_ended)  # it was killed, and dies in its own time


def test_a_program_that_cannot_be_started_is_a_fault_too() -> None:
    (device,) = asyncio.run(probe("vendor", command=("/no/such/program",)))
    assert "cannot be started" in device.fault


def test_a_child_stays_for_the_next_question_and_one_that_failed_does_not() -> None:
    code = (
        "import json, os, sys\n"
        "for n, _ in enumerate(sys.stdin.buffer):\n"
        "    if n == 2: os.abort()\n"
        "    device = {'backend': 'vendor', 'id': str(os.getpid()), 'kind': 'npu', 'temp_c': 40.0 + n}\n"
        "    print(json.dumps([device]), flush=True)\n"
    )

    async def main() -> list[DeviceState]:
        child = ProbeChild("vendor", command=(sys.executable, "-c", code))
        try:
            return [(await child.read())[0] for _ in range(4)]
        finally:
            await child.end()

    first, second, crashed, anew = asyncio.run(main())
    assert (first.temp_c, second.temp_c, second.id) == (40.0, 41.0, first.id)
    assert "signal 6" in crashed.fault
    assert anew.temp_c == 40.0
    assert anew.id != first.id
    assert not Path(f"/proc/{anew.id}").exists()


def test_a_child_ends_with_its_parent() -> None:
    command = [sys.executable, "-P", "-m", "edge_rt.worker.probe", "null"]
    ended = subprocess.run(command, check=True, input=b"\n\n", capture_output=True, timeout=PATIENCE_S)
    assert ended.stdout.count(b"\n") == 2


def test_a_survey_asks_at_once_and_one_that_fails_hides_no_other() -> None:
    async def ask(name: str) -> tuple[DeviceState, ...]:
        return absent(name, "broken") if name == "b" else (DeviceState(backend=name, id="0", kind="npu"),)

    found = survey(["a", "b"], ask)
    assert [device.fault for devices in found.values() for device in devices] == ["", "broken"]
    assert list(found) == ["a", "b"]
