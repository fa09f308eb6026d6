from __future__ import annotations

import json
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edge_rt import config
from edge_rt.backends.base import Absent, Device
from edge_rt.backends.llama_build import Broken, Build, inspect, missing, parse
from edge_rt.cli import checks, main
from edge_rt.cli.checks import Check, Patient, examine
from edge_rt.cli.doctor import text
from edge_rt.config import CloudEndpoint
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import BackendUnavailableError, ModelChecksumError
from edge_rt.tensor_types import DeviceState
from edge_rt.worker.probe import absent
from tests.device_trees import container, plant, raspberry_pi_5, x86_server

__all__ = ["container", "plant", "raspberry_pi_5", "x86_server"]

Plant = Callable[[Mapping[str, str]], SysfsRoot]
NATIVE_INFO = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | REPACK = 1 | "


def _store(path: Path) -> config.Config:
    return config.Config(catalog=config.Catalog(store_dir=str(path)))


def _socket(path: Path) -> config.Config:
    return config.Config(server=config.Server(socket_path=str(path)))


@contextmanager
def _mode(path: Path, mode: int) -> Iterator[None]:
    old = path.stat().st_mode
    path.chmod(mode)
    yield
    path.chmod(old)


# llama.cpp's build


def test_system_info_is_read_in_our_names() -> None:
    assert parse(NATIVE_INFO) == {"neon", "dotprod"}
    assert parse("CPU : SSE3 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AVX2 = 0 | ") == {"avx512f", "avx512_vnni"}
    assert parse("") == frozenset()


def test_a_build_for_this_cpu_is_ok(raspberry_pi_5: SysfsRoot) -> None:
    build = Build(version="0.3.36", compiled=parse(NATIVE_INFO))
    check = checks.llama_build(Patient(root=raspberry_pi_5, inspect_build=lambda: build))
    assert check.status == "ok"
    assert "0.3.36" in check.detail


def test_a_generic_build_is_slow(x86_server: SysfsRoot) -> None:
    build = Build(version="0.3.36", compiled=parse("CPU : AVX = 1 | AVX2 = 1 | FMA = 1 | F16C = 1 | BMI2 = 1"))
    check = checks.llama_build(Patient(root=x86_server, inspect_build=lambda: build))
    assert check.status == "warn"
    assert "avx512_vnni" in check.detail
    assert "GGML_NATIVE" in check.remedy


def test_features_that_llama_has_no_kernels_for_are_not_missing() -> None:
    assert missing(Build(version="1", compiled=frozenset({"avx2"})), frozenset({"avx2", "ssse3", "sve2"})) == ()


def test_a_child_that_dies_of_an_illegal_instruction_is_a_crashed_build() -> None:
    broken = inspect(lambda command, **_: subprocess.CompletedProcess(command, -4, "", ""))
    assert broken == Broken(reason="loading it ended with SIGILL", crashed=True)
    check = checks.llama_build(Patient(inspect_build=lambda: Broken(reason="x", crashed=True)))
    assert (check.status, check.remedy.startswith("rebuild")) == ("fail", True)


def test_a_child_without_llama_says_its_last_line() -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nImportError: no llama_cpp\n")

    assert inspect(run) == Broken(reason="ImportError: no llama_cpp", crashed=False)


def test_a_child_that_hangs_is_a_crashed_build() -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 30)

    assert inspect(run) == Broken(reason="did not load within 30 s", crashed=True)


# the native engine


class FakeNative:
    """The compiled library, for a CPU that has the first n of its instruction sets."""

    def __init__(self, n_usable: int) -> None:
        self._n_usable = n_usable

    def en_isa_count(self) -> int:
        return 2

    def en_isa_name(self, isa: int) -> bytes:
        return (b"portable", b"avx2")[isa]

    def en_isa_usable(self, isa: int) -> bool:
        return isa < self._n_usable


def test_the_native_engine_says_which_kernels_it_has_here() -> None:
    check = checks.native(Patient(load_native=lambda: FakeNative(2)))
    assert (check.status, check.detail) == ("ok", "avx2 kernels")
    assert "llama.cpp" in checks.native(Patient(load_native=lambda: FakeNative(1))).detail


def test_onnxruntime_is_told_of_and_not_missed() -> None:
    here = (Device(id="cpu", kind="cpu", detail="onnxruntime 9.9"),)
    assert checks.onnx(Patient(probe_onnx=lambda: here)).detail == "onnxruntime 9.9"
    check = checks.onnx(Patient(probe_onnx=lambda: Absent(reason="not installed", extra="onnx")))
    assert (check.status, "edge_rt[onnx]" in check.detail) == ("ok", True)


def test_a_native_engine_that_was_not_compiled_is_a_warning() -> None:
    def absent() -> None:
        raise BackendUnavailableError(backend="native", reason="no C compiler")

    check = checks.native(Patient(load_native=absent))
    assert (check.status, check.detail) == ("warn", "no C compiler")


# store and model


def test_an_empty_store_is_fine_and_its_model_is_to_be_pulled(store_dir: Path) -> None:
    patient = Patient(config=_store(store_dir))
    assert checks.store(patient).status == "ok"
    check = checks.model(patient)
    assert check.status == "warn"
    assert check.remedy == "edge_rt models pull smollm2-135m-instruct"


def test_a_store_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert checks.store(Patient(config=_store(tmp_path / "a" / "b"))).status == "ok"
    assert not (tmp_path / "a").exists()


def test_a_full_disk_cannot_take_the_model(store_dir: Path) -> None:
    check = checks.store(Patient(config=_store(store_dir), free_bytes=lambda _path: 10**6))
    assert check.status == "fail"
    assert "0.00 GB free" in check.detail


def test_a_proxy_that_is_not_used_is_told_where_an_endpoint_is_remote() -> None:
    def found(base_url: str, **environ: str) -> Check | None:
        cloud = {"big": CloudEndpoint(base_url=base_url, model="m")}
        return checks.proxies(Patient(config=config.Config(cloud=cloud), environ=environ))

    check = found("https://api.example/v1", HTTPS_PROXY="http://10.0.0.1:3128", all_proxy="socks5://x")
    assert check is not None
    assert (check.status, "HTTPS_PROXY, all_proxy" in check.detail) == ("warn", True)
    assert found("https://api.example/v1", HTTPS_PROXY="", NO_PROXY="*") is None
    assert found("unix:/run/peer.sock", HTTPS_PROXY="http://10.0.0.1:3128") is None
    assert checks.proxies(Patient(environ={"HTTPS_PROXY": "http://10.0.0.1:3128"})) is None


def test_an_error_of_ours_is_that_checks_failure() -> None:
    def broken(_patient: Patient) -> Check:
        raise ModelChecksumError(path="x.gguf", expected="a", actual="b")

    def vanished(_patient: Patient) -> Check:
        raise FileNotFoundError(2, "No such file or directory", "/gone")

    results = examine(Patient(), (broken, vanished, checks.python))
    assert [(check.name, check.status) for check in results] == [
        ("broken", "fail"),
        ("vanished", "fail"),
        ("python", "ok"),
    ]
    assert "the manifest says a" in results[0].detail
    assert results[1].detail == "/gone: No such file or directory"


# socket and daemon


def test_a_directory_anyone_may_write_is_dangerous(socket_dir: Path) -> None:
    patient = Patient(config=_socket(socket_dir / "e.sock"))
    assert checks.socket_directory(patient).status == "ok"
    with _mode(socket_dir, 0o777):
        check = checks.socket_directory(patient)
        assert check.status == "fail"
        assert check.remedy == f"chmod o-w {socket_dir}"
    with _mode(socket_dir, 0o1777):
        assert checks.socket_directory(patient).status == "ok"


def test_a_directory_still_to_be_made(socket_dir: Path) -> None:
    check = checks.socket_directory(Patient(config=_socket(socket_dir / "run" / "e.sock")))
    assert (check.status, check.detail) == ("ok", f"{socket_dir / 'run'} will be made by the daemon")


def test_a_user_without_a_runtime_directory_gets_one_warning_with_a_remedy(store_dir: Path) -> None:
    patient = Patient(config=_store(store_dir), environ={}, uid=1000)
    results = examine(patient, (checks.socket_directory, checks.daemon))
    assert [(check.name, check.status) for check in results] == [("socket", "warn")]
    assert "XDG_RUNTIME_DIR" in results[0].detail
    assert "--socket" in results[0].remedy


def test_without_a_daemon_it_says_how_to_start_one(socket_dir: Path) -> None:
    check = checks.daemon(Patient(config=_socket(socket_dir / "e.sock")))
    assert check is not None
    assert (check.status, check.remedy) == ("warn", "edge_rt serve")


def test_a_stale_socket_is_no_daemon(socket_dir: Path) -> None:
    path = socket_dir / "e.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    check = checks.daemon(Patient(config=_socket(path)))
    assert check is not None
    assert (check.status, check.detail) == ("warn", f"nobody answers on {path}: Connection refused")


def test_a_socket_that_speaks_no_http_is_not_well(socket_dir: Path) -> None:
    path = socket_dir / "e.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(2)

        def hang_up() -> None:
            for _ in range(2):
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        check = checks.daemon(Patient(config=_socket(path)))
        thread.join()
    assert check is not None
    assert check.status == "fail"


# the machine


@pytest.mark.model
def test_too_little_memory_fails_before_a_load_does(model_store: Path, plant: Plant) -> None:
    root = plant({"proc/meminfo": "MemAvailable: 100000 kB\n"})
    check = checks.room(Patient(root=root))
    assert check is not None
    assert check.status == "fail"
    assert "98 MiB are available" in check.detail


@pytest.mark.model
def test_a_llama_cpp_that_kills_its_process_is_not_loaded_into_this_one(model_store: Path) -> None:
    assert checks.room(Patient(inspect_build=lambda: Broken(reason="SIGILL", crashed=True))) is None


def test_cgroup_limits(plant: Plant, container: SysfsRoot) -> None:
    check = checks.cgroup(Patient(root=container))
    assert (check.status, check.detail) == ("ok", "CPU quota 1.5 cores, memory limit 512 MiB")
    root = plant({"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert checks.cgroup(Patient(root=root)).status == "warn"


def test_no_cgroup_limit(raspberry_pi_5: SysfsRoot) -> None:
    assert checks.cgroup(Patient(root=raspberry_pi_5)).detail == "no CPU or memory limit"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("", "ok"),
        ("/dev/zram0 partition 4000000 3000000 100\n", "ok"),
        ("/dev/mmcblk0p3 partition 100000 0 -2\n", "warn"),
        ("/swapfile file 4000000 1000 -2\n", "ok"),
        ("/swapfile file 4000000 3000000 -2\n", "warn"),
    ],
)
def test_swap(plant: Plant, line: str, status: str) -> None:
    root = plant({"proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n" + line})
    assert checks.swap(Patient(root=root)).status == status


def test_locked_memory_matters_only_with_swap(plant: Plant) -> None:
    limited, unlimited = (lambda: 8 * 2**20), (lambda: resource.RLIM_INFINITY)
    root = plant({"proc/swaps": "Filename Type Size Used Priority\n"})
    assert checks.locked_memory(Patient(root=root, memlock_bytes=limited)).status == "ok"
    root = plant({"proc/swaps": "Filename Type Size Used Priority\n/swapfile file 4 1 -2\n"})
    assert checks.locked_memory(Patient(root=root, memlock_bytes=limited)).status == "warn"
    assert checks.locked_memory(Patient(root=root, memlock_bytes=unlimited)).status == "ok"


@pytest.mark.parametrize(
    ("governor", "driver", "status"),
    [
        ("schedutil", "cpufreq-dt", "ok"),
        ("powersave", "cpufreq-dt", "warn"),
        ("powersave", "intel_pstate", "ok"),
        ("powersave", "amd-pstate-epp", "ok"),
        ("powersave", "", "warn"),
    ],
)
def test_governor(plant: Plant, governor: str, driver: str, status: str) -> None:
    policy = "sys/devices/system/cpu/cpufreq/policy0"
    root = plant({f"{policy}/scaling_governor": governor, f"{policy}/scaling_driver": driver})
    assert checks.governor(Patient(root=root)).status == status


def test_clock(plant: Plant) -> None:
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    now = 1_796_000_000.0
    root = plant({source: "arch_sys_counter"})
    assert checks.clock(Patient(root=root, wall_clock=lambda: now)).status == "ok"
    assert checks.clock(Patient(root=root, wall_clock=lambda: 3600.0)).status == "fail"
    root = plant({source: "hpet"})
    assert checks.clock(Patient(root=root, wall_clock=lambda: now)).status == "warn"


def test_throttling(raspberry_pi_5: SysfsRoot) -> None:
    check = checks.throttling(Patient(root=raspberry_pi_5))
    assert check.status == "warn"
    assert "under-voltage" in check.detail


def test_unknown_throttling_is_no_complaint(container: SysfsRoot) -> None:
    assert checks.throttling(Patient(root=container)).status == "ok"


# the command


def test_lines_are_aligned_and_a_remedy_stands_below() -> None:
    shown = click.unstyle(text([checks.ok("a", "fine"), checks.fail("longer", "broken", "mend it")]))
    assert shown.splitlines() == ["ok    a       fine", "fail  longer  broken", "              → mend it"]


def test_the_command_reports_this_machine(store_dir: Path, socket_dir: Path) -> None:
    environ = {
        "EDGE_RT__CATALOG__STORE_DIR": str(store_dir),
        "EDGE_RT__SERVER__SOCKET_PATH": str(socket_dir / "e.sock"),
    }
    result = CliRunner(env=environ).invoke(main, ["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert found["python"]["status"] == "ok"
    assert found["model"]["status"] == "warn"
    assert found["daemon"]["status"] == "warn"
    assert result.exit_code == any(check["status"] == "fail" for check in found.values())


def test_the_command_examines_the_configuration_named_before_it(tmp_path: Path, socket_dir: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text(f'[server]\nsocket_path = "{socket_dir}/named.sock"\n[catalog]\nstore_dir = "{tmp_path}"\n')
    result = CliRunner().invoke(main, ["--config", str(file), "doctor"])
    assert f"nobody answers on {socket_dir}/named.sock" in result.stdout


def test_a_broken_configuration_is_a_failed_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text("[engine]\nn_batch = 5\n")
    result = CliRunner().invoke(main, ["doctor", "--config", str(file)])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fail  config")
    assert any(line.startswith("ok    python") for line in lines)


def test_manifests_that_are_left_out_are_listed(tmp_path: Path) -> None:
    (tmp_path / "torn.toml").write_text("id = \n")
    patient = Patient(
        config=config.Config(catalog=config.Catalog(store_dir=str(tmp_path / "s"), manifest_dirs=(str(tmp_path),)))
    )
    check = checks.manifests(patient)
    assert (check.status, "torn.toml: TOML" in check.detail) == ("warn", True)
    (tmp_path / "torn.toml").unlink()
    assert checks.manifests(patient).status == "ok"


def test_a_board_is_looked_for_only_where_it_is_wanted() -> None:
    def never(name: str) -> tuple[DeviceState, ...]:
        raise AssertionError(name)

    assert checks.fpga(Patient(probe=never)) is None
    wanted = config.Config(fpga=config.Fpga(bitstream="/x/e4.bit"))
    here = (DeviceState(backend="fpga", id="fpga", kind="fpga", detail="KV260"),)
    found = checks.fpga(Patient(config=wanted, probe=lambda _: here))
    assert found is not None
    assert (found.status, found.detail) == ("ok", "KV260")
    named = config.Config(models={"m": config.ModelSettings(backend="fpga")})
    failed = checks.fpga(Patient(config=named, probe=lambda name: absent(name, "pynq finds no device")))
    assert failed is not None
    assert (failed.status, failed.detail) == ("fail", "pynq finds no device")
