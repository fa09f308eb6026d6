from __future__ import annotations

import json

from click.testing import CliRunner

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, BackendProbe, Device
from edge_rt.cli import main
from edge_rt.cli.devices import Survey, _told, survey, text
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.tensor_types import DeviceState
from tests.device_trees import container, plant, raspberry_pi_5, rk3588, x86_hybrid, x86_server

__all__ = ["container", "plant", "raspberry_pi_5", "rk3588", "x86_hybrid", "x86_server"]

PROBES = (
    BackendProbe(name="llama_cpu", devices=(Device(id="cpu", kind="cpu", detail="llama.cpp 1"),)),
    BackendProbe(name="null", devices=(Device(id="null", kind="null", detail="for tests", evidence="stub"),)),
    BackendProbe(name="npu", absent=Absent(reason="no driver", extra="npu-x")),
)


def _look(root: SysfsRoot) -> str:
    return text(_survey(root))


def _survey(root: SysfsRoot) -> Survey:
    return survey(root, PROBES)


def test_big_little(rk3588: SysfsRoot) -> None:
    shown = _look(rk3588)
    assert "cpu       4x Cortex-A55 + 4x Cortex-A76" in shown
    assert "cpu 0-3: small, Cortex-A55, capacity 530, 1.80 GHz" in shown
    assert "cpu 4-7: big, Cortex-A76, capacity 1024, 2.40 GHz" in shown
    assert "features  dotprod fp16 neon" in shown
    assert "throttling now: cpufreq-cpu4 at cooling state 2" in shown


def test_server(x86_server: SysfsRoot) -> None:
    shown = _look(x86_server)
    assert "avx512_vnni" in shown
    assert "hyper-thread" in shown
    assert "power     rapl package-0 + dram + package-1 + dram: counts energy (soc, measured, every 0.05 s" in shown
    assert "coretemp Package id 0 57.5 °C, slows down at 82 °C" in shown


def test_hybrid(x86_hybrid: SysfsRoot) -> None:
    shown = _look(x86_hybrid)
    assert "big by /sys/devices/cpu_core/cpus" in shown
    assert "swap 8.19 GB" in shown


def test_pi(raspberry_pi_5: SysfsRoot) -> None:
    shown = _look(raspberry_pi_5)
    assert "board     Raspberry Pi 5 Model B Rev 1.0" in shown
    assert "throttling now: under-voltage, throttled" in shown


def test_what_a_container_hides_has_reasons(container: SysfsRoot) -> None:
    shown = _look(container)
    assert "big or small is unknown" in shown
    assert "CPU quota 1.5 cores (/sys/fs/cgroup/cpu.max)" in shown
    assert "control group limit 0.54 GB, 0.43 GB of it free" in shown
    assert "clocks    cpu: unknown, no cpufreq policy" in shown
    assert "power     rapl: none, no RAPL counter" in shown


def test_back_ends_and_why_one_is_absent(container: SysfsRoot) -> None:
    shown = _look(container)
    assert "back end  llama_cpu: device cpu, llama.cpp 1" in shown
    assert "null: device null (stub), for tests" in shown
    assert "npu: absent, no driver; pip install 'edge_rt[npu-x]'" in shown


def test_the_command_prints_this_machine_as_json() -> None:
    result = CliRunner().invoke(main, ["devices", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["usable"]["compute_cpus"]) >= 1
    assert [probe["name"] for probe in found["backends"]] == list(registry.names())
    assert set(found["power"]) >= {"meters", "absent"}
    assert set(found["heat"]["peak_c"]) == {"value", "source", "reason"}


def test_what_a_vendors_process_tells_reads_as_what_was_asked_here() -> None:
    facts = {"id": "npu0", "kind": "npu", "detail": "chip", "evidence": "simulator", "free_bytes": 5, "fault": "hot"}
    told = _told("npu", [DeviceState(backend="npu", **facts)])  # type: ignore[arg-type]
    assert told.devices == (Device(**facts),)  # type: ignore[arg-type]
    reason = "back end npu is not available: no driver; install it with `pip install 'edge_rt[npu-x]'`"
    absent = _told("npu", [DeviceState(backend="npu", id="none", kind="none", fault=reason)]).absent
    assert absent is not None
    assert absent.reason == "no driver; install it with `pip install 'edge_rt[npu-x]'`"
