"""A machine with real systemd as PID 1: systemd-nspawn over an overlay of this machine's own root, in memory.

Needs root, systemd-nspawn (Debian: systemd-container), overlayfs and nothing else; about a second to boot. What is
written stays in a tmpfs and is gone at the end. The interpreter of the tests and its packages are bound to /opt, where
a service may read them, so nothing is installed twice.

    with Container.boot(...) as container:
        container.run("systemctl", "start", "edge_rt.socket")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/edge_rt/bin/python"
_LIBRARIES = "/opt/python/lib"
_ENVIRON = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "SYSTEMD_PAGER": "cat",
    "LD_LIBRARY_PATH": _LIBRARIES,
}
_MAX_SHARES = 262144  # of the CPU; everything else has 1024 a group or task
_COMMAND_TIMEOUT_S = 120.0

# Nothing of a real machine's hardware or network belongs here.
_MASKED = (
    "getty.target",
    "console-getty.service",
    "systemd-timesyncd.service",
    "systemd-networkd.service",
    "systemd-resolved.service",
    "systemd-logind.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-update-utmp.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "swap.target",
    "timers.target",
)
_TARGET = """\
[Unit]
Description=What the tests need
Requires=basic.target
After=basic.target
AllowIsolate=yes
"""
# cgroup v1 hierarchies come read-only, and limits that are set would silently not hold.
_INIT = """\
#!/bin/sh
for controller in memory pids cpu devices blkio freezer; do
    [ -d /sys/fs/cgroup/$controller ] && mount -o remount,rw,bind /sys/fs/cgroup/$controller
done
exec /lib/systemd/systemd --unit=edge-test.target
"""


def why_not() -> str:
    """Say why no container can be had here, "" if one can."""
    if os.geteuid() != 0:
        return "real systemd in a container takes root"
    if shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn is not installed: apt-get install systemd-container"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlayfs"
    return ""


class Container:
    """A booted machine. Made by boot."""

    def __init__(self, base: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.base = base
        self.root = base / "root"  # as it is on disk; what is mounted inside is below live
        self._process = process
        self._log = log
        self.init_pid = 0

    @classmethod
    @contextlib.contextmanager
    def boot(cls, *, binds: tuple[str, ...] = (), comes_first: bool = False) -> Iterator[Self]:
        """Boot, and tear everything down at the end.

        binds        SOURCE:TARGET directories to be seen inside, writable
        comes_first  whatever else this machine does gets what is left of the CPU
        """
        with contextlib.ExitStack() as stack:
            base = Path(tempfile.mkdtemp(prefix="ert-nspawn-"))
            stack.callback(base.rmdir)
            _mount("-t", "tmpfs", "-o", "mode=0755,size=3g", "edge_rt-test", str(base))
            stack.callback(_unmount, base)
            for name in ("upper", "work", "root"):
                (base / name).mkdir()
            (base / "upper").chmod(0o755)
            layers = f"lowerdir=/,upperdir={base / 'upper'},workdir={base / 'work'}"
            _mount("-t", "overlay", "-o", layers, "edge_rt-test", str(base / "root"))
            stack.callback(_unmount, base / "root")
            _prepare(base / "root")
            cgroups = _Cgroups(f"edge_rt-test-{os.getpid()}", comes_first=comes_first)
            stack.callback(cgroups.remove)
            log = base / "console.log"
            command = [
                "systemd-nspawn",
                "--quiet",
                f"--directory={base / 'root'}",
                "--register=no",
                "--keep-unit",
                "--private-network",
                "--console=pipe",
                "--kill-signal=SIGRTMIN+3",
                "--link-journal=no",
                f"--bind-ro={sys.base_prefix}:/opt/python",
                f"--bind-ro={sysconfig.get_path('purelib')}:/opt/site-packages",
                f"--bind-ro={ROOT}:/opt/source",
                *(f"--bind={bind}" for bind in binds),
                "/edge-test-init",
            ]
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    preexec_fn=cgroups.enter,
                )
            self = cls(base, process, log)
            stack.callback(self._end)
            self._wait_for_boot()
            yield self

    def run(self, *command: str, check: bool = True, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root. With check, a failure is an assertion that shows what it said."""
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        done = subprocess.run(
            ["nsenter", f"--target={self.init_pid}", *spaces, "--", *command],
            input=stdin.decode(),
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
            env=_ENVIRON,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def live(self, path: str) -> Path:
        """Give where a path of the running machine is seen from outside, sockets and tmpfs among them."""
        return Path(f"/proc/{self.init_pid}/root", path.lstrip("/"))

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        place = self.live(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--property", name, "--value", unit).stdout.strip()

    def pid(self, unit: str) -> int:
        """Give the unit's main process by this machine's, the outer one's, numbers; 0 without one."""
        inner = int(self.show(unit, "MainPID"))
        return self.outer_pid(inner) if inner else 0

    def outer_pid(self, inner: int) -> int:
        """Find a process of the container from outside, by its number inside."""
        space = Path(f"/proc/{self.init_pid}/ns/pid").readlink()
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if (status.with_name("ns") / "pid").readlink() != space:
                    continue
                numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == inner:
                    return int(numbers[1])
        raise AssertionError(f"no process {inner} in the container")

    def journal(self, unit: str) -> str:
        return self.run("journalctl", f"--unit={unit}", "--no-pager", "--output=cat").stdout

    def until(self, what: str, condition: object, *, timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> float:
        """Wait for another machine's doings; give how long it took."""
        assert callable(condition)
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < timeout_s, f"{what}: not within {timeout_s} s\n{self.console()}"
            time.sleep(every_s)  # waits for other processes; no clock of ours to move
        return time.monotonic() - began_s

    def console(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _wait_for_boot(self) -> None:
        began_s = time.monotonic()
        while True:
            assert self._process.poll() is None, f"the container ended\n{self.console()}"
            assert time.monotonic() - began_s < PATIENCE_S, f"no boot\n{self.console()}"
            if not self.init_pid:
                self.init_pid = _child_of(self._process.pid)
            elif self.run("systemctl", "is-active", "edge-test.target", check=False).stdout.strip() == "active":
                return
            time.sleep(0.05)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # nspawn passes SIGRTMIN+3 on: halt
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def fill_memory(pid: int, *, n_mib: int) -> str:
    """Give a script that fills the memory of a process' control group from four others in it, until that one is gone.

    pid    by this machine's numbers
    n_mib  of each of the four: the kernel takes the one with the highest score, its share of the memory in thousandths
           plus what it was given
    """
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    inner = next(line for line in status if line.startswith("NSpid:")).split()[-1]
    return (
        "import os, time\n"
        "from pathlib import Path\n"
        f"victim = Path('/proc/{inner}')\n"
        "group = next(x for x in (victim / 'cgroup').read_text().splitlines() if ':memory:' in x).split(':')[2]\n"
        "Path('/sys/fs/cgroup/memory' + group + '/cgroup.procs').write_text(str(os.getpid()))\n"
        "os.fork(), os.fork()\n"
        "held = []\n"
        "while victim.exists():\n"
        f"    if len(held) < {n_mib}:\n"
        "        held.append(bytearray(os.urandom(1 << 20)))\n"
        "    time.sleep(0.01)\n"
    )


def _child_of(pid: int) -> int:
    """Find PID 1 of the container: the child of nspawn, or of its stub, that is the first in a namespace of its own."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, StopIteration):
            lines = status.read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if int(fields["PPid"]) == pid and fields["NSpid"].split()[1:] == ["1"] and fields["Name"] == "systemd":
                return int(status.parent.name)
    return 0


def _prepare(root: Path) -> None:
    """Put what the container needs into its root."""
    units = root / "etc" / "systemd" / "system"
    units.mkdir(parents=True, exist_ok=True)
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    (units / "edge-test.target").write_text(_TARGET)
    # A Python built as a shared library looks for that where it was installed, which is no place for a service.
    manager = root / "etc" / "systemd" / "system.conf.d" / "edge-test.conf"
    manager.parent.mkdir(exist_ok=True)
    manager.write_text(f"[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH={_LIBRARIES}\n")
    init = root / "edge-test-init"
    init.write_text(_INIT)
    init.chmod(0o755)
    for name in ("python", "site-packages", "source"):
        (root / "opt" / name).mkdir(parents=True, exist_ok=True)
    # A venv by hand: its interpreter and packages are those of the tests, at places that a service may read.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    venv = root / "opt" / "edge_rt"
    packages = venv / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (packages / "edge_rt.pth").write_text("/opt/source\n/opt/site-packages\n")
    (venv / "pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(f"/opt/python/bin/{version}")
    shutil.rmtree(root / "var" / "lib" / "edge_rt", ignore_errors=True)  # this machine's own store
    (root / "etc" / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (root / "etc" / "fstab").unlink(missing_ok=True)


class _Cgroups:
    """A child group in every hierarchy of cgroup v1, in which the container's namespace begins."""

    def __init__(self, name: str, *, comes_first: bool) -> None:
        self._groups: list[Path] = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names:  # the unified hierarchy needs none
                continue
            mount = Path("/sys/fs/cgroup", names.removeprefix("name="))
            if not mount.is_dir():
                continue
            group = mount / path.lstrip("/") / name
            group.mkdir(exist_ok=True)
            if names == "cpuset":
                for limit in ("cpuset.cpus", "cpuset.mems"):
                    (group / limit).write_text((group.parent / limit).read_text())
            if comes_first and (shares := group / "cpu.shares").exists():
                shares.write_text(str(_MAX_SHARES))
            self._groups.append(group)

    def enter(self) -> None:
        for group in self._groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        for group in self._groups:
            for directory, _, _ in os.walk(group, topdown=False):
                for _ in range(50):  # what has just died is still counted for a moment
                    try:
                        Path(directory).rmdir()
                        break
                    except FileNotFoundError:
                        break
                    except OSError:
                        time.sleep(0.05)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--recursive", "--lazy", str(place)], check=False)
