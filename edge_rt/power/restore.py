"""`python -m edge_rt.power.restore`: give the machine its own limits back, whatever has become of powerd.

systemd runs it after powerd has ended (ExecStopPost=+), however that was; powerd runs it when it starts. Does nothing
where there is nothing to put back, so it may run any number of times. Imports os, sys and time only.

    --snapshot FILE  instead of /run/edge_rt-powerd/snapshot
    --root DIR       instead of /, for tests

Exit status: 0 all is as it was, 1 something is not and stays in the file, 2 the file cannot be used.
"""

from __future__ import annotations

import sys
import time

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.power.snapshot import DEFAULT_FILE, BadSnapshotError, Restored, Snapshot, boot_id, put_back


def restore(snapshot: Snapshot, files: KernelFiles) -> list[Restored]:
    """Put back all values of a snapshot and forget those that are. Raises OSError if the file cannot be changed."""
    found = put_back(files, list(snapshot.values.values()), time.sleep)
    snapshot.drop([one.value.path for one in found if one.is_done])
    return found


def main(arguments: list[str]) -> int:
    options = {"--snapshot": DEFAULT_FILE, "--root": "/"}
    words = list(arguments)
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if name not in options or (not is_joined and not words):
            say(3, f"usage: python -m edge_rt.power.restore [--snapshot FILE] [--root DIR]; got {name!r}")
            return 2
        options[name] = value if is_joined else words.pop(0)
    files = KernelFiles(options["--root"])
    snapshot = Snapshot(options["--snapshot"], boot_id(files))
    try:
        if not snapshot.load():
            return 0
        found = restore(snapshot, files)
    except BadSnapshotError as exc:
        say(3, f"{snapshot.file} {exc}; a reboot gives the kernel's own limits back, then remove the file")
        return 2
    except OSError as exc:
        say(3, f"{snapshot.file} cannot be changed: {exc.strerror or exc}")
        return 1
    for one in found:
        say(6 if one.is_done else 3, told(one))
    return 0 if all(one.is_done for one in found) else 1


def told(one: Restored) -> str:
    """Say in a line what became of a value."""
    words = {"as_it_was": "was as before", "put_back": "is back", "failed": "IS NOT BACK"}
    reason = f": {one.reason}" if one.reason else ""
    return f"/{one.value.path} = {one.value.text}: {words.get(one.outcome, one.outcome)}{reason}"


def say(priority: int, text: str) -> None:
    """Write a line to stderr with its priority, as systemd reads it."""
    try:
        sys.stderr.write(f"<{priority}>{text}\n")
    except OSError:
        return  # nobody listens: no reason to leave limits where they are


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
