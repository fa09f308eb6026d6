"""Run the native engine's check on x86-64 CPUs that this machine is not: `make emulate-x86`.

qemu-user runs it as CPUs without AVX or without AVX2, where an instruction too new ends the program. Bochs boots a
Debian kernel, whose only process is the check, on CPUs with AVX-512 and AVX-VNNI, which qemu-user does not emulate. So
emulators show that results are right and that each CPU gets the kernels it has; they say nothing about speed.

Bochs 3.0 is compiled once (2.7 and older lack AVX-VNNI). Its source, a kernel, BIOS and boot loader come from Debian's
archive by apt, without being installed, and are kept in ~/.cache/edge_rt/emulate_x86. As root, missing programs are
installed. Where something cannot be had, the reason is printed and nothing is run.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.native_check import ROOT, build_check
from tools.progress import CommandError, run

SUITE = "trixie"  # with Bochs 3.0
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# The programs needed, and the packages that have them.
PROGRAMS = {
    "g++": "g++",
    "make": "make",
    "xz": "xz-utils",
    "genisoimage": "genisoimage",
    "qemu-x86_64-static": "qemu-user-static",
}
UNPACKED = ("bochsbios", "vgabios", "isolinux", "syslinux-common")
BOCHS_OPTIONS = (
    "--enable-cpu-level=6",
    "--enable-x86-64",
    "--enable-avx",
    "--enable-evex",
    "--enable-pci",
    "--enable-repeat-speedups",
    "--enable-fast-function-calls",
    "--enable-handlers-chaining",
    "--with-nogui",
    "--without-x",
    "--without-wx",
    "--disable-plugins",
    "--disable-docbook",
)
N_ROUNDS = "1"
QEMU_TIMEOUT_S, BOCHS_TIMEOUT_S, POLL_S = 900.0, 1800.0, 0.5
ENDED = re.compile(r"^check ended: (\d+)\s*$", re.MULTILINE)

# Without AVX; without AVX; AVX alone.
QEMU_CPUS = {"qemu64": ["portable"], "Nehalem": ["portable"], "SandyBridge": ["portable"]}
BOCHS_CPUS = {
    "corei7_skylake_x": ["portable", "avx2", "avx512"],
    "arrow_lake": ["portable", "avx2", "avxvnni"],
    "sapphire_rapids": ["portable", "avx2", "avxvnni", "avx512", "avx512vnni"],
}

# Bochs 3.0 and this kernel disagree about fast repeated moves (fsrm, erms: an endless page fault) and about system
# management mode under ACPI; it lacks the counters of aperfmperf, which the kernel would read at every tick.
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet nokaslr mitigations=off acpi=off tsc=reliable lpj=4000000 no_timer_check"
    " clearcpuid=fsrm,erms,aperfmperf"
)
ISOLINUX = "DEFAULT check\nPROMPT 0\nLABEL check\n  KERNEL /vmlinuz\n  APPEND initrd=/initrd.gz {arguments}\n"
BOCHSRC = """megs: 256
cpu: model={cpu}, count=1, ips=100000000, reset_on_triple_fault=0
romimage: file={bios}/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file={bios}/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path={folder}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/{cpu}.serial
display_library: nogui
panic: action=fatal
error: action=ignore
info: action=ignore
log: {folder}/{cpu}.log
clock: sync=none
"""


class CannotEmulateError(Exception):
    """Something needed is not here and cannot be had; the message says what."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What it takes to emulate one: Bochs, a kernel, and the unpacked packages with BIOS and boot loader."""

    bochs: Path
    kernel: Path
    packages: Path


def require_programs() -> None:
    """Install what is missing, where that is allowed. Raises CannotEmulateError."""
    if platform.machine() != "x86_64":
        raise CannotEmulateError(f"this is {platform.machine()}: the check is compiled for x86_64 here")
    install_programs(PROGRAMS)


def install_programs(programs: dict[str, str]) -> None:
    """Install the packages of those programs that are not here. Raises CannotEmulateError."""
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotEmulateError(f"these packages are needed: {' '.join(missing)}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotEmulateError(f"{shlex.join(command)} failed: {done.stderr.strip()[-300:]}")


class Archive:
    """Debian's archive of one suite, beside the suites this machine is set up for. Installs nothing."""

    def __init__(self, folder: Path, suite: str = SUITE) -> None:
        self.folder, self._suite = folder, suite
        self._options = [
            *("-o", "Dir::Etc::sourcelist=" + str(folder / "sources.list"), "-o", "Dir::Etc::sourceparts=-"),
            *("-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"),
            *("-o", "APT::Sandbox::User=", "-q"),
        ]

    def update(self) -> None:
        """Read the lists of packages. Raises CannotEmulateError."""
        if shutil.which("apt-get") is None or not KEYRING.exists():
            raise CannotEmulateError("the kernel comes from Debian's archive: apt-get and its keyring are needed")
        form = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CREATED_BY) $(REPO_URI)"]
        targets = subprocess.run(form, capture_output=True, text=True, check=False).stdout
        mirrors = re.findall(r"^Debian Packages (\S*/debian/?)$", targets, re.MULTILINE)
        if not mirrors:
            raise CannotEmulateError("the kernel comes from Debian's archive, and apt has no mirror of it")
        for name in ("lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        line = f"[signed-by={KEYRING}] {mirrors[0]} {self._suite} main\n"
        (self.folder / "sources.list").write_text(f"deb {line}deb-src {line}", encoding="utf-8")
        self._apt("apt-get", "update")

    def unpack(self, package: str, target: Path) -> None:
        """Put a package's files below target."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            self._apt("apt-get", "download", package, cwd=Path(scratch))
            (file,) = Path(scratch).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(file), str(target)], check=True)

    def dependency_of(self, package: str) -> str:
        found = re.search(r"Depends: (\S+)", self._apt("apt-cache", "depends", package))
        assert found is not None, package
        return found[1]

    def source_of(self, package: str, target: Path) -> Path:
        """Unpack the upstream source below target and give its folder."""
        self._apt("apt-get", "source", "--download-only", "--tar-only", package, cwd=target)
        (file,) = target.glob("*.orig.tar.*")
        subprocess.run(["tar", "-xf", str(file), "-C", str(target)], check=True)
        (folder,) = (path for path in target.iterdir() if path.is_dir())
        return folder

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        command = [program, *self._options, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
        if done.returncode:
            raise CannotEmulateError(f"{program} {shlex.join(arguments)}: {done.stderr.strip()[-300:]}")
        return done.stdout


def prepare_machine(cache: Path) -> Machine:
    """Give Bochs and what it boots, from the cache or made now. Raises CannotEmulateError, CommandError."""
    machine = Machine(cache / "bochs-3.0", cache / "vmlinuz", cache / "packages")
    if all(path.exists() for path in (machine.bochs, machine.kernel, machine.packages)):
        return machine
    cache.mkdir(parents=True, exist_ok=True)
    archive = Archive(cache / "apt")
    archive.update()
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as name:
        scratch = Path(name)
        for package in UNPACKED:
            archive.unpack(package, scratch / "packages")
        kernel = archive.dependency_of("linux-image-cloud-amd64")
        archive.unpack(kernel, scratch / "kernel")
        (scratch / "source").mkdir()
        bochs = _compile_bochs(archive.source_of("bochs", scratch / "source"), cache / "bochs.log")
        shutil.rmtree(machine.packages, ignore_errors=True)
        (scratch / "packages").rename(machine.packages)
        next(scratch.glob("kernel/boot/vmlinuz-*")).rename(machine.kernel)
        bochs.rename(machine.bochs)
    shutil.rmtree(archive.folder)
    return machine


def _compile_bochs(source: Path, log: Path) -> Path:
    command = f"cd {shlex.quote(str(source))} && ./configure {shlex.join(BOCHS_OPTIONS)} && make -j{os.cpu_count()}"

    def stage(line: str) -> str | None:
        found = re.search(r" -c .* (\w+\.cc)\b", line)
        return found[1] if found else None

    run("compiling Bochs 3.0", ["sh", "-c", command], stage=stage, log=log)
    return source / "bochs"


def archive_of_files(files: dict[str, bytes]) -> bytes:
    """A cpio archive as the kernel takes it for its first file system (newc); every file may be executed."""
    parts = []
    for number, (name, data) in enumerate([*files.items(), ("TRAILER!!!", b"")], 1):
        fields = (number, 0o100755, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = "070701" + "".join(f"{field:08X}" for field in fields) + name + "\0"
        parts.append(head.encode() + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))
    return b"".join(parts)


def write_boot_image(machine: Machine, check: Path, init: Path, folder: Path) -> None:
    """Make folder/boot.iso, a CD that boots into the check."""
    disc = folder / "disc"
    (disc / "isolinux").mkdir(parents=True)
    files = {"init": init.read_bytes(), "check": check.read_bytes()}
    (disc / "initrd.gz").write_bytes(gzip.compress(archive_of_files(files), 1))
    shutil.copy(machine.kernel, disc / "vmlinuz")
    lib = machine.packages / "usr/lib"
    for file in (lib / "ISOLINUX/isolinux.bin", lib / "syslinux/modules/bios/ldlinux.c32"):
        shutil.copy(file, disc / "isolinux")
    (disc / "isolinux/isolinux.cfg").write_text(ISOLINUX.format(arguments=KERNEL_ARGUMENTS), encoding="utf-8")
    boot = ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4"]
    command = ["genisoimage", "-quiet", *boot, "-boot-info-table", "-o", str(folder / "boot.iso"), str(disc)]
    subprocess.run(command, check=True)


def run_in_qemu(check: Path, cpu: str) -> str:
    """What the check prints, and how it ended."""
    command = ["qemu-x86_64-static", "-cpu", cpu, str(check), N_ROUNDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=QEMU_TIMEOUT_S)
    return f"{done.stdout}check ended: {done.returncode}\n"


def run_in_bochs(machine: Machine, folder: Path, cpu: str) -> str:
    """What came over the serial port until the check ended."""
    config, serial = folder / f"{cpu}.bochsrc", folder / f"{cpu}.serial"
    config.write_text(BOCHSRC.format(cpu=cpu, bios=machine.packages, folder=folder), encoding="utf-8")
    command = [str(machine.bochs), "-q", "-f", str(config)]
    with (folder / f"{cpu}.out").open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        deadline_s = time.monotonic() + BOCHS_TIMEOUT_S
        text = ""
        try:
            while not ENDED.search(text) and process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                text = serial.read_text(errors="replace") if serial.exists() else ""
        finally:
            process.kill()
            process.wait()
    return text if ENDED.search(text) else f"{text}\n{(folder / f'{cpu}.log').read_text(errors='replace')[-1000:]}"


def fault_in(output: str, expected: list[str]) -> str:
    """Say what is wrong with what the check printed on a CPU with these instruction sets, best last; "" if nothing."""
    usable = re.findall(r"^(\w+): usable\s*$", output, re.MULTILINE)
    best = re.findall(r"^best: (\w+)\s*$", output, re.MULTILINE)
    ended = ENDED.search(output)
    if usable != expected or best != expected[-1:]:
        return f"it has {expected}, the check found {usable} and chose {best}"
    if ended is None or ended[1] != "0" or not re.search(r"^all good\s*$", output, re.MULTILINE):
        return "the check did not end well"
    return ""


def report(emulator: str, cpu: str, expected: list[str], output: str) -> bool:
    fault = fault_in(output, expected)
    print(f"{'FAILED' if fault else 'ok'}  {cpu}, emulated by {emulator}: {fault or ', '.join(expected)}", flush=True)
    if fault:
        print(output[-3000:])
    return not fault


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "emulate_x86"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        require_programs()
        machine = prepare_machine(cache)
    except CannotEmulateError as exc:
        print(f"skipped: {exc}")
        return 0
    except CommandError as exc:
        print(f"skipped: Bochs does not compile; the whole output is in {exc.log}\n{exc.tail}")
        return 0
    with tempfile.TemporaryDirectory(prefix="emulate-") as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        check, init = build_check(compiler, folder), folder / "init"
        init_source = ROOT / "native/tests/emulated_init.c"
        rounds = f'-DN_ROUNDS="{N_ROUNDS}"'
        subprocess.run([*compiler, "-static", "-O1", rounds, str(init_source), "-o", str(init)], check=True)
        write_boot_image(machine, check, init, folder)
        qemu = {cpu: pool.submit(run_in_qemu, check, cpu) for cpu in QEMU_CPUS}
        bochs = {cpu: pool.submit(run_in_bochs, machine, folder, cpu) for cpu in BOCHS_CPUS}
        good = [report("qemu-user", cpu, QEMU_CPUS[cpu], job.result()) for cpu, job in qemu.items()]
        good += [report("Bochs 3.0", cpu, BOCHS_CPUS[cpu], job.result()) for cpu, job in bochs.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
