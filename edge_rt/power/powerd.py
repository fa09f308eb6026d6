"""`python -m edge_rt.power.powerd`: sets clocks as the inference daemon's work needs them, and gives them back.

A small process with the rights to write a few kernel files, so that the inference daemon has none. Standard library
only.

    --config FILE    read [power] there instead of $EDGE_RT_CONFIG or /etc/edge_rt/config.toml
    --dry-run        set nothing, whatever power.enabled says
    --once           decide once, print what came of it as JSON, give everything back, and end
    --root DIR       look for /sys and /proc below DIR, for tests
    --snapshot FILE  keep the machine's own limits there instead of in /run/edge_rt-powerd/snapshot

SIGTERM and SIGINT give everything back and end; SIGHUP reads the settings again. Exit status: 0, 1 if a limit could not
be given back or another process sets clocks already, 78 for settings that are wrong.
"""

from __future__ import annotations

from edge_rt import held_signals

if __name__ == "__main__":
    held_signals.hold()  # before the imports that take their time

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power import server, settings
from edge_rt.power.actuators import Actuators
from edge_rt.power.assemble import groups, make_meter, make_policy, settable
from edge_rt.power.conflicts import rivals
from edge_rt.power.governor import Governor
from edge_rt.power.log import Log
from edge_rt.power.ownership import ClocksTakenError, take
from edge_rt.power.report import power_report, report
from edge_rt.power.restore import restore, told
from edge_rt.power.sensing import PowerReader, Sensing
from edge_rt.power.settings import Settings
from edge_rt.power.snapshot import DEFAULT_FILE, BadSnapshotError, Snapshot, boot_id
from edge_rt.power.state import Hint, Limits
from edge_rt.sd_notify import notify, watchdog_interval_s

_EXIT_CONFIG: Final = 78
_FLAGS: Final = {"--dry-run": "is_dry", "--once": "once"}
_VALUES: Final = ("config", "root", "snapshot")
_IDLE_S: Final = 1.0  # between two looks without work
_EVENT_S: Final = 0.02  # from a look to the next one that a hint asks for
_RIVALS_S: Final = 60.0
_REFIND_S: Final = 2.0  # from one look for new clocks to the next …
_REFIND_ALL_S: Final = 60.0  # … and for old ones that have other steps now
_STATUS_S: Final = 1.0  # between two STATUS= lines
_MISTAKE: Final = "a mistake of its own: "
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    config: str | None = None
    is_dry: bool = False
    once: bool = False
    root: str = "/"
    snapshot: str = DEFAULT_FILE


class Powerd:
    """The process: one governor, one socket, one loop.

    Raises ConfigError for settings that are wrong; the machine has its own limits back by then. Raises
    ClocksTakenError, with nothing touched, where another process sets clocks.
    """

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
    ) -> None:
        self.options, self.environ, self.clock = options, environ, clock
        self.log = log or Log(clock)
        self.file = settings.find(options.config, environ)
        self.settings = settings.load(self.file)
        self._limits: tuple[Settings, float, Limits] | None = None  # as last reckoned, and of what
        self.run_cap_w = 0.0  # set over the socket; it ends with the process
        self.rivals: tuple[str, ...] = ()
        self._files = KernelFiles(options.root)
        self._root = SysfsRoot(Path(options.root))
        self._snapshot = Snapshot(options.snapshot, boot_id(self._files))
        self._lock_fd = -1
        self._snapshot_problem = self._take_clocks()
        self.governor = self._governor(self.settings)
        self._check_rivals()
        self._is_ending = self._wants_reload = self._is_asked = False
        self._said_status = ""
        self._known, self._found_s = self._there(), clock()

    @property
    def limits(self) -> Limits:
        """What must hold: the settings', and the cap that was set over the socket if it is lower."""
        if self._limits is None or self._limits[0] is not self.settings or self._limits[1] != self.run_cap_w:
            self._limits = self.settings, self.run_cap_w, self._limits_now()
        return self._limits[2]

    def _limits_now(self) -> Limits:
        now = self.settings
        caps = [cap for cap in (now.max_w, self.run_cap_w) if cap > 0]
        return Limits(
            max_w=min(caps, default=0.0),
            battery_w=now.battery_w,
            max_c=now.max_c,
            ttft_slo_s=now.ttft_slo_s,
            tpot_slo_s=now.tpot_slo_s,
        )

    def status(self) -> dict[str, Any]:
        """Tell what is going on, in one message's room."""
        return report(self.governor, self.limits, self.run_cap_w, self.rivals, self.settings, self.clock())

    def power(self) -> dict[str, Any]:
        """Tell what the meter has counted."""
        return power_report(self.governor.sensing, f"power.meter is {self.settings.meter}, and nothing was found")

    def once(self) -> int:
        """Decide once and print what came of it."""
        self.governor.step(self.clock(), [], self.limits)
        found = self.status()
        is_back = self.governor.restore()
        self._close()
        print(json.dumps(found, indent=2))
        return 0 if is_back else 1

    def run(self) -> int:
        """Serve until a signal ends it; give everything back."""
        with selectors.DefaultSelector() as selector:
            woken, wakes = socket.socketpair()
            try:
                woken.setblocking(False)
                wakes.setblocking(False)
                selector.register(woken, selectors.EVENT_READ, lambda: _drain(woken))
                before = [(number, signal.signal(number, self._on_signal)) for number in _SIGNALS]
                former_fd = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
                held_signals.release()
                try:
                    return self._serve(selector)
                finally:
                    signal.set_wakeup_fd(former_fd)
                    for number, handler in before:
                        signal.signal(number, handler)
            finally:
                woken.close()
                wakes.close()

    def _serve(self, selector: selectors.BaseSelector) -> int:
        now = self.settings
        listener, is_own = server.listen(now.socket_path, now.socket_group, self.environ)
        clients = server.Server(
            listener,
            selector,
            server.rights(now.socket_group, now.cap_group),
            self.status,
            self._on_hint,
            self._on_cap,
            self.log.say,
            self.clock,
            power=self.power,
        )
        is_back = True
        try:
            notify("READY=1", self.environ)
            gc.freeze()  # what is there now stays until the end
            self._loop(selector, clients)
            notify("STOPPING=1", self.environ)
        finally:
            is_back = self.governor.restore()
            clients.close()
            if is_own:
                _remove(now.socket_path)
            self._close()
        return 0 if is_back else 1

    def _close(self) -> None:
        self.governor.sensing.close()
        self._files.close()
        self._leave_clocks()  # the last: until here nobody else may set any

    def _loop(self, selector: selectors.BaseSelector, clients: server.Server) -> None:
        watch_s = watchdog_interval_s(self.environ) or _IDLE_S
        next_s = watchdog_s = rivals_s = refind_s = self.clock()
        stepped_s = status_s = -_IDLE_S
        while not self._is_ending:
            wait_s = min(next_s, watchdog_s, clients.resume_s) - self.clock()
            for key, _ in selector.select(max(0.0, wait_s)):
                key.data()
            now_s = self.clock()
            clients.resume(now_s)
            if self._wants_reload:
                self._wants_reload = False
                self._reload()
            if now_s >= rivals_s:
                rivals_s = now_s + _RIVALS_S
                self._check_rivals()
                self._look_for_a_meter()
            if now_s >= refind_s:
                refind_s = now_s + _REFIND_S
                self._look_again()
            if self._is_asked:
                self._is_asked = False
                next_s = min(next_s, stepped_s + _EVENT_S)
            if now_s >= next_s:
                self._step(now_s, clients.hints())
                clients.advise(self.governor.advice, is_dry=self.governor.is_dry, now_s=now_s)
                interval_s = self.settings.interval_s if self.governor.is_busy else _IDLE_S
                stepped_s, next_s = now_s, max(next_s + interval_s, self.clock())
            if now_s >= watchdog_s:
                # From this loop and no other thread: a loop that hangs in a driver is to be found out.
                notify("WATCHDOG=1", self.environ)
                watchdog_s = now_s + watch_s
            if now_s - status_s >= _STATUS_S:
                status_s = now_s
                self._say_status()

    def _step(self, now_s: float, hints: Sequence[Hint]) -> None:
        try:
            self.governor.step(now_s, hints, self.limits)
        except Exception as exc:  # noqa: BLE001  whatever nobody foresaw, the machine is given back
            self.governor.stop(f"{_MISTAKE}{type(exc).__name__}: {exc}")

    # What comes from outside.

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            self._wants_reload = True
        else:
            self._is_ending = True

    def _on_hint(self) -> None:
        self._is_asked = True

    def _on_cap(self, max_w: float, peer: server.Peer) -> None:
        self.run_cap_w = max_w
        self._is_asked = True
        self.log.say(5, f"cap {max_w}", f"user {peer.uid} caps the power at {max_w:g} W" if max_w else "cap taken away")

    def _reload(self) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", self.environ)
        try:
            fresh = settings.load(self.file)
            server.rights(fresh.socket_group, fresh.cap_group)
        except ConfigError as exc:
            self.log.say(3, f"reload {exc}", f"the settings are left as they were: {exc}")
        else:
            if (fresh.socket_path, fresh.socket_group, fresh.cap_group) != (
                self.settings.socket_path,
                self.settings.socket_group,
                self.settings.cap_group,
            ):
                self.log.say(4, "reload socket", "a change of the socket or of who may cap needs a restart")
            self.governor.restore()
            self.governor.sensing.close()
            self.settings = fresh
            try:
                self._snapshot_problem = self._take_clocks()
            except ClocksTakenError as exc:
                self._snapshot_problem = str(exc)
            self.governor = self._governor(fresh)
            self._check_rivals()
            self.log.say(5, f"reload {self.clock()}", f"the settings of {self.file or 'no file'} hold now")
        notify("READY=1", self.environ)

    # What is there.

    def _governor(self, now: Settings) -> Governor:
        is_dry = self.options.is_dry or not now.enabled
        files = DryFiles(self._files) if is_dry else self._files
        found = settable(self._root, now.actuators)
        if not found:
            self.log.say(4, "clocks", f"no clock can be set here (power.actuators: {', '.join(now.actuators)})")
        meter = make_meter(now, self._root, self.log.say)
        sensing = Sensing(self._root, self._files, meter, groups(self._root), self.clock)
        snapshot, own = (None, self._snapshot.values) if is_dry else (self._snapshot, None)
        actuators = Actuators(files, found, snapshot, also=now.actuators, own=own)
        governor = Governor(
            sensing, actuators, make_policy(now, self.log.say), is_dry=is_dry, say=self.log.say, sleep=time.sleep
        )
        if self._snapshot_problem and not is_dry:
            governor.stopped_by = self._snapshot_problem
        return governor

    def _look_again(self) -> None:
        """Take up clocks that were plugged in, or were not ready when this process began."""
        now_s, there = self.clock(), self._there()
        if there == self._known and now_s - self._found_s < _REFIND_ALL_S:
            return
        self._known, self._found_s = there, now_s
        self.governor.actuators.update(settable(self._root, self.settings.actuators))
        self.governor.sensing.groups = groups(self._root)

    def _there(self) -> list[str]:
        """List the names of all clocks, and the CPUs that run: when they change it is worth to look closer."""
        found = []
        for folder in ("sys/devices/system/cpu/cpufreq", "sys/class/devfreq"):
            with contextlib.suppress(OSError):
                found += self._files.names(folder)
        with contextlib.suppress(OSError):
            found.append(self._files.read("sys/devices/system/cpu/online"))
        return found

    def _look_for_a_meter(self) -> None:
        if self.governor.sensing.power is None:
            meter = make_meter(self.settings, self._root, self.log.say)
            self.governor.sensing.power = PowerReader(meter, self.clock) if meter is not None else None

    def _take_clocks(self) -> str:
        """Be the only one that sets clocks, as long as power.enabled, and put back what an earlier process has left.

        Gives why acting is not safe, "" if it is. Raises ClocksTakenError.
        """
        if self.options.is_dry:
            return self._give_back_leftovers()
        try:
            self._lock_fd = self._lock_fd if self._lock_fd >= 0 else take(self._snapshot.file)
            return self._give_back_leftovers()
        except ClocksTakenError as exc:
            if self.settings.enabled:
                raise
            return str(exc)
        except OSError as exc:
            problem = f"the lock {self._snapshot.file}.lock cannot be taken: {exc.strerror or exc}"
            self.log.say(3, "lock", problem)
            return problem
        finally:
            if not self.settings.enabled:
                self._leave_clocks()

    def _leave_clocks(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _give_back_leftovers(self) -> str:
        """Put back what an earlier process has left; give why acting is not safe, "" if it is.

        What --dry-run finds is left there: it may be that of a powerd that runs.
        """
        try:
            if self._snapshot.load(keep=self.options.is_dry) and not self.options.is_dry:
                for one in restore(self._snapshot, self._files):
                    self.log.say(4 if one.is_done else 3, f"leftover {one.value.path}", told(one))
        except (BadSnapshotError, OSError) as exc:
            words = exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
            problem = (
                f"the snapshot {self._snapshot.file} {words}; a reboot gives the kernel's own limits back. If it holds"
            )
            problem += " none of powerd's, remove it and reload"
            self.log.say(3, "snapshot", problem)
            return problem
        return ""

    def _check_rivals(self) -> None:
        found = rivals(self._files)
        self.rivals = tuple(rival.name for rival in found)
        for rival in found:
            self.log.say(4 if rival.writes else 6, f"rival {rival.name}", f"{rival.name} runs too ({rival.evidence})")
        writing = next((rival for rival in found if rival.writes), None)
        if self.settings.force or self.governor.is_dry:
            return
        prefix = "another power manager runs: "
        if writing is not None:
            self.governor.stop(f"{prefix}{writing.name} ({writing.evidence}). Remedy: {writing.remedy}")
        elif self.governor.stopped_by.startswith((prefix, _MISTAKE)):
            self.governor.resume()

    def _say_status(self) -> None:
        governor = self.governor
        text = governor.state if not governor.stopped_by else f"stopped: {governor.stopped_by}"
        if not governor.stopped_by:
            text += f", {governor.decision.reason}"
            if governor.applied.is_postponed:
                text += ", waits until the chip has cooled"
            if governor.applied.faults:
                text += f", {len(governor.applied.faults)} files fail"
        if text != self._said_status:
            self._said_status = text
            notify(f"STATUS={text}", self.environ)


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(256):
            pass
    except BlockingIOError:
        return


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, without argparse: it would take 2 % of the memory. Raises ConfigError."""
    options: dict[str, Any] = {}
    words = list(arguments)
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        key = name.removeprefix("--")
        if name in _FLAGS and not is_joined:
            options[_FLAGS[name]] = True
        elif name.startswith("--") and key in _VALUES and (is_joined or words):
            options[key] = value if is_joined else words.pop(0)
        else:
            raise ConfigError(key=name, problem="no such option, or its value is missing", origin="command line")
    return Options(**options)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    if arguments and arguments[0] in {"-h", "--help"}:
        print(__doc__)
        return 0
    log = Log(time.monotonic)
    try:
        powerd = Powerd(parse(arguments), environ, log=log)
        return powerd.once() if powerd.options.once else powerd.run()
    except ConfigError as exc:
        log.say(3, "settings", str(exc))
        return _EXIT_CONFIG
    except ClocksTakenError as exc:
        log.say(3, "owner", str(exc))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
