"""What runs in the guest as its only program: loads the drivers, tries them, prints a verdict, powers off."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.plants.powerd_process import Powerd

sys.path.insert(0, "/srv")
sys.dont_write_bytecode = True

POLICY = Path("/sys/devices/system/cpu/cpufreq/policy0")
# kHz, W and °C of board.asl
BOARD = (
    (600_000, 0.486, 47.0),
    (1_000_000, 1.1, 55.0),
    (1_500_000, 2.1, 65.0),
    (2_000_000, 3.9, 75.0),
    (2_400_000, 5.929, 83.0),
)
_FINIT_MODULE, _DELETE_MODULE = 313, 176  # x86-64
_POWER_OFF = 0x4321FEDC
_SETTLE_S = 0.5  # the meter's own interval is 0.1 s

libc = ctypes.CDLL(None, use_errno=True)
failed: list[bool] = []  # of each check


def check(name: str, problems: list[str]) -> None:
    failed.append(bool(problems))
    print(f"check: {name}: {'; '.join(problems) or 'ok'}", flush=True)


def tried(name: str, call: Callable[[], list[str]]) -> None:
    """Run a check; what it raises is its problem."""
    try:
        check(name, call())
    except Exception as error:  # noqa: BLE001 - the verdict must come, whatever a check runs into
        traceback.print_exc()
        check(name, [f"{type(error).__name__}: {error}"])


def differs(what: str, found: object, wanted: object) -> list[str]:
    return [] if found == wanted else [f"{what} is {found!r}, not {wanted!r}"]


def start() -> None:
    for kind, place in (
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/run"),
        ("tmpfs", "/tmp"),
    ):
        if libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None):
            print(f"mount {place}: {os.strerror(ctypes.get_errno())}", flush=True)
    for name in Path("/lib/modules/order").read_text(encoding="ascii").split():
        load(name)


def load(name: str) -> None:
    fd = os.open(f"/lib/modules/{name}", os.O_RDONLY)
    if libc.syscall(_FINIT_MODULE, fd, b"", 0):
        print(f"{name}: {os.strerror(ctypes.get_errno())}", flush=True)
    os.close(fd)


def read(name: str) -> str:
    fd = os.open(POLICY / name, os.O_RDONLY)
    try:
        return os.pread(fd, 4096, 0).decode().strip()
    finally:
        os.close(fd)


def write(name: str, text: str) -> str:
    """Give the errno's name, or "" where the kernel took it."""
    try:
        fd = os.open(POLICY / name, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def patience(n: int = 100) -> Callable[[], bool]:
    """Wait 10 ms at each call, n times."""
    left = iter(range(n))

    def wait() -> bool:
        time.sleep(0.01)
        return next(left, None) is not None

    return wait


def facts() -> None:
    from tests.plants.facts import FACTS, POINTS_KHZ, broken

    points = sorted(int(word) for word in read("scaling_available_frequencies").split())
    check("the driver is acpi-cpufreq", differs("it", read("scaling_driver"), "acpi-cpufreq"))
    check("the points are the table's", differs("they", tuple(points), POINTS_KHZ))
    for name, steps in FACTS.items():
        tried(name, lambda steps=steps: broken(steps, read, write, patience()))
    for text in ("1000000 kHz", "0x16e360", " 1000000", "1.5e6"):
        # Not checked: kernels that read with sscanf take these, kernels that read with kstrtoul do not.
        told = write("scaling_max_freq", text)
        print(f"note: scaling_max_freq < {text!r}: {told or 'taken'}, shows {read('scaling_max_freq')}", flush=True)
    write("scaling_max_freq", "2400000")


def sensors() -> None:
    from edge_rt.devices import cpufreq
    from edge_rt.devices.battery import BatteryMeter
    from edge_rt.devices.meter_choice import Panel, choose, find
    from edge_rt.devices.sysfs import SysfsRoot
    from edge_rt.devices.thermal import temperatures
    from tests.plants.facts import POINTS_KHZ

    root = SysfsRoot(Path("/"))
    (policy,) = cpufreq.policies(root)
    check("both CPUs are in one policy", differs("they", policy.cpus, (0, 1)))
    check("its points are read in Hz", differs("they", policy.points_hz, tuple(khz * 1e3 for khz in POINTS_KHZ)))
    panel = Panel(find(root))
    battery = BatteryMeter(root)
    write("scaling_governor", "performance")
    for khz, power_w, heat_c in BOARD:
        write("scaling_max_freq", str(khz))
        time.sleep(_SETTLE_S)
        panel.read(time.monotonic())
        time.sleep(_SETTLE_S)
        panel.read(time.monotonic())
        meter = choose(panel.meters, panel.readings).board
        check(
            f"{khz} kHz: the board's power",
            near("it", panel.powers_w.get(meter.name) if meter else None, power_w)
            or differs("its meter", meter and meter.name.split()[0], "power_meter"),
        )
        sample = battery.read(time.monotonic()).value
        check(f"{khz} kHz: the battery's power", near("it", sample.power_w if sample else None, power_w))
        heat = root.scaled("sys/class/thermal/thermal_zone0/temp", 1e-3)
        check(f"{khz} kHz: the temperature", near("it", heat.value, heat_c))
    check("ACPI's zone is not taken for the chip's temperature", differs("they", temperatures(root), ()))
    write("scaling_max_freq", str(POINTS_KHZ[-1]))


def limits() -> tuple[str, str]:
    return read("scaling_min_freq"), read("scaling_max_freq")


def until(holds: Callable[[], bool]) -> bool:
    wait = patience(500)
    while not holds():
        if not wait():
            return False
    return True


def _in_force_hz(status: Mapping[str, Any]) -> float:
    return float(status["clocks"].get("policy0", {}).get("in_force_hz") or 0.0)


def powerd() -> None:
    from tests.plants.powerd_process import Powerd

    own = ("1000000", "2000000")
    watts = {khz * 1e3: power_w for khz, power_w, _ in BOARD}
    write("scaling_governor", "performance")
    write("scaling_max_freq", own[1])
    write("scaling_min_freq", own[0])
    until(lambda: limits() == own)
    folder = Path("/tmp/powerd")
    folder.mkdir()
    with Powerd(Path("/"), folder) as process:
        for work in ("prefill", "decode"):
            process.work("decode")  # first, so that there is something to write for a prompt too
            process.until(lambda status: 0 < _in_force_hz(status) < float(own[1]) * 1e3)
            process.work(work)
            process.until(
                lambda status, work=work: (_in_force_hz(status) == float(own[1]) * 1e3) == (work == "prefill")
            )
            time.sleep(2 * _SETTLE_S)
            status = process.status()
            hz = status["clocks"]["policy0"]["in_force_hz"]
            print(f"note: {work}: {hz * 1e-9:g} GHz, {status['power_w']} W by {status['meter']}", flush=True)
            check(f"{work}: powerd's clock is in force", differs("it", limits()[1], str(round(hz / 1e3))))
            check(f"{work}: powerd sees the driver's power", near("it", status["power_w"], watts.get(hz, -1.0)))
            is_own = hz == float(own[1]) * 1e3
            check(
                f"{work}: its clock lies within the user's limits", [] if is_own == (work == "prefill") else [str(hz)]
            )
        check("powerd ends by SIGKILL", differs("its status", process.end(signal.SIGKILL), -signal.SIGKILL))
        check("then its limit is still there", [] if limits() != own else ["it is not"])
        begun_s = time.monotonic()
        check("restore ends well", differs("its status", process.restore(), 0))
        print(f"note: restore took {time.monotonic() - begun_s:.2f} s in the emulated guest", flush=True)
        check(
            "after SIGKILL and restore the limits are back", [] if until(lambda: limits() == own) else [str(limits())]
        )
        for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
            process.start()
            process.until(lambda status: status["n_writes"] > 0)
            check(f"powerd ends by {name}", differs("its status", process.end(number), 0))
            check(f"after {name} the limits are back", [] if until(lambda: limits() == own) else [str(limits())])
        process.start()
        process.until(lambda status: status["n_writes"] > 0)
        assert process.process is not None
        process.process.send_signal(signal.SIGSTOP)
        process.end(signal.SIGKILL)
        process.start()
        process.until(lambda status: status["n_writes"] > 0)
        check("a second life ends by SIGTERM", differs("its status", process.end(signal.SIGTERM), 0))
        check("after two lives the limits are back", [] if until(lambda: limits() == own) else [str(limits())])
        driver_anew(process, own)


def driver_anew(process: Powerd, own: tuple[str, str]) -> None:
    """Take the driver away under powerd, and let it come back without anybody's limits."""
    process.start()
    process.until(lambda status: status["n_writes"] > 0)
    if libc.syscall(_DELETE_MODULE, b"acpi_cpufreq", os.O_NONBLOCK):
        check("the driver can be taken away", [os.strerror(ctypes.get_errno())])
        return
    check("the policy is gone", ["it is there"] if POLICY.exists() else [])
    status = process.until(lambda status: all(one["in_force_hz"] is None for one in status["clocks"].values()))
    print(f"note: without the driver: {status['state']}, {status['faults']}", flush=True)
    load("acpi-cpufreq.ko")
    check("the policy is back", [] if until(POLICY.is_dir) else ["it is not"])
    process.until(lambda status: any(one["in_force_hz"] is not None for one in status["clocks"].values()))
    check("powerd ends by SIGTERM", differs("its status", process.end(signal.SIGTERM), 0))
    check("the new driver has the limits that powerd found", [] if until(lambda: limits() == own) else [str(limits())])


def near(what: str, found: float | None, wanted: float) -> list[str]:
    return [] if found is not None and abs(found - wanted) <= 0.02 * wanted else [f"{what} is {found}, not {wanted}"]


def main() -> None:
    start()
    print(f"note: Linux {os.uname().release}, Python {sys.version.split()[0]}", flush=True)
    tried("the policy is there", lambda: [] if POLICY.is_dir() else [str(sorted(Path(POLICY).parent.parent.iterdir()))])
    tried("all facts were tried", lambda: facts() or [])
    tried("all sensors were read", lambda: sensors() or [])
    tried("powerd was tried", lambda: powerd() or [])
    print(f"verdict: {len(failed)} checks, {sum(failed)} failed", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - if the first process ends, the kernel panics and the trace is lost
        traceback.print_exc()
    finally:
        time.sleep(0.2)  # the serial line has to be empty
        os.sync()
        libc.reboot(_POWER_OFF)
