"""The published pynq package on the simulated engine, in its own environment: `make test-pynq` makes it. Simulated."""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from hw.fpga.sim.build import CONFIGS, source_hash
from tools.build_llama import one_at_a_time
from tools.pynq_venv import find

pytestmark = pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT_S = 600
# pynq 4 left the Zynq-7000 behind, and 3.1 is the last for it; the engine is driven by both on both.
PAIRS = [("4.0.0", "kv260-gemv"), ("4.0.0", "z2-gemv"), ("3.1.2", "z2-gemv"), ("3.1.2", "kv260-gemv")]
PAIRS += [("4.0.0", "kv260-gemm"), ("4.0.0", "z2-gemm"), ("3.1.2", "z2-gemm"), ("3.1.2", "kv260-gemm")]
CASES = [
    "clean_runs_are_right_again_and_again",
    "each_missing_flush_gives_wrong_results",
    "a_ring_that_is_not_flushed_is_refused",
    "a_missing_invalidate_gives_wrong_results",
    "a_later_change_that_is_not_flushed_is_not_seen",
    "memory_without_a_cache_needs_neither",
    "part_of_a_buffer_is_flushed_alone",
    "a_pointer_outside_memory_is_an_error",
    "a_pointer_that_was_never_set_is_an_error",
    "silent_memory_times_out",
    "a_flipped_bit_is_noticed",
    "after_an_abort_the_next_run_is_clean",
    "a_register_that_is_not_there_is_an_error",
    "a_wide_counter_is_read_at_once_here_and_by_halves_over_the_network",
    "a_load_begins_with_a_fresh_engine",
    "reading_every_register_changes_nothing",
    "files_that_do_not_belong_together_are_refused",
    "memory_that_is_used_up_says_so_and_comes_back",
]

ENGINE_CASES = [
    "a_look_finds_the_board_and_loads_nothing",
    "products_are_the_cpus_bit_for_bit",
    "silent_memory_is_an_error_with_status_and_the_cpu_answers",
    "a_refused_read_is_tried_again_and_then_computed_on_the_cpu",
    "a_flipped_bit_is_noticed_and_tried_again",
    "one_process_has_the_board_at_a_time",
    "too_little_memory_says_how_much_is_needed",
]

HERE_ONLY = {
    "memory_without_a_cache_needs_neither",
    "part_of_a_buffer_is_flushed_alone",
    "files_that_do_not_belong_together_are_refused",
}


def interpreter(version):
    python = find(version)
    if python is None:
        pytest.skip(f"pynq {version} has no environment here: make test-pynq makes it")
    return python


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in ("BOARD", "PYNQ_REMOTE_DEVICES")}
    return {**kept, **more}


def run_on_device(version, config_name, folder, script):
    command = [
        interpreter(version),
        "-m",
        "hw.fpga.sim.device",
        config_name,
        folder,
        script,
        folder / "e4.bit",
    ]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stderr
    return json.loads(done.stdout)


def check_user_result(found, config_name):
    assert found["n_wrong"] == 0
    assert found["n_rows"] == 128
    assert found["n_vectors"] == CONFIGS[config_name].n_vectors
    assert found["tag"] == 7
    assert found["status"] == 0
    assert found["n_polls"] > 0  # time passes while it is polled, not all at once
    assert found["build"] == source_hash()[:8]
    assert 8 * found["beat_bytes"] == CONFIGS[config_name].beat_bits
    assert found["fclk0_mhz"] == pytest.approx(
        {"kv260": 300, "z2": 142.857}[config_name[: config_name.find("-")]], 1e-4
    )


@pytest.mark.parametrize(("version", "config_name"), PAIRS)
def test_a_users_script_multiplies_on_the_overlay(tmp_path, version, config_name):
    found = run_on_device(version, config_name, tmp_path, HERE / "user_script.py")
    check_user_result(found, config_name)


@contextmanager
def served(python, config_name, folder):
    """Serve a board on an address of its own: PYNQ.remote's port is fixed, and someone may use it."""
    address = f"127.1.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    serve = [python, "-m", "hw.fpga.sim.remote", config_name, folder, address]
    # One run at a time: over the network pynq keeps what it read of a hand-off in its own package's folder.
    with (
        one_at_a_time(python.parents[1] / "remote.lock"),
        subprocess.Popen(
            serve, env=environment(PYTHONPATH=str(ROOT)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        try:
            assert server.stdout.readline() == f"ready {address}\n"
            yield address
            server.stdin.close()
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()


def run_on_network(python, address, folder, script, **more):
    done = subprocess.run(
        [python, script, folder / "e4.bit"],
        env=environment(PYNQ_REMOTE_DEVICES=address, **more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("config_name", ["kv260-gemv", "kv260-gemm"])
def test_the_same_script_reaches_a_board_over_the_network(tmp_path, config_name):
    python = interpreter("4.0.0")
    with served(python, config_name, tmp_path) as address:
        for _ in range(2):  # the second load is of the same file, by another client
            check_user_result(run_on_network(python, address, tmp_path, HERE / "user_script.py"), config_name)


def test_faults_over_the_network(tmp_path):
    python = interpreter("4.0.0")
    with served(python, "kv260-gemv", tmp_path) as address:
        found = run_on_network(python, address, tmp_path, HERE / "pynq_cases.py", PYTHONPATH=str(ROOT))
    assert found == dict.fromkeys(name for name in CASES if name not in HERE_ONLY)


def test_the_server_stays_on_loopback(tmp_path):
    serve = [interpreter("4.0.0"), "-m", "hw.fpga.sim.remote", "kv260-gemv", tmp_path, "0.0.0.0"]
    done = subprocess.run(
        serve, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "0.0.0.0 is not on loopback" in done.stderr


@pytest.fixture(scope="module", params=[PAIRS[0], PAIRS[2], PAIRS[4], PAIRS[6]], ids=" ".join)
def found_cases(request, tmp_path_factory):
    return run_on_device(*request.param, tmp_path_factory.mktemp("cases"), HERE / "pynq_cases.py")


def test_every_case_is_named(found_cases):
    assert list(found_cases) == CASES


@pytest.mark.parametrize("name", CASES)
def test_faults(found_cases, name):
    assert found_cases[name] is None, found_cases[name]


@pytest.fixture(scope="module", params=[PAIRS[0], PAIRS[2]], ids=" ".join)
def found_engine_cases(request, tmp_path_factory):
    return run_on_device(*request.param, tmp_path_factory.mktemp("engine"), HERE / "pynq_engine.py")


def test_every_case_of_the_products_driver_is_named(found_engine_cases):
    assert list(found_engine_cases) == ENGINE_CASES


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_the_products_driver_on_pynq(found_engine_cases, name):
    assert found_engine_cases[name] is None, found_engine_cases[name]
