"""What `make emulate-x86` makes and how it judges; the emulators themselves are not run here."""

from __future__ import annotations

import pytest

from tools.emulate_x86 import archive_of_files, fault_in

GOOD = """portable: usable
avx2: usable\r
avxvnni: not on this CPU
[    1.1] a line of the kernel
best: avx2\r
all good
check ended: 0
"""


@pytest.mark.parametrize(
    ("output", "expected", "fault"),
    [
        (GOOD, ["portable", "avx2"], ""),
        (GOOD, ["portable", "avx2", "avxvnni"], "the check found ['portable', 'avx2'] and chose ['avx2']"),
        (GOOD.replace("best: avx2", "best: portable"), ["portable", "avx2"], "chose ['portable']"),
        (GOOD.replace("all good", "avx2: product of type 2 differs"), ["portable", "avx2"], "did not end well"),
        (GOOD.replace("ended: 0", "ended: 132"), ["portable", "avx2"], "did not end well"),
        (GOOD.replace("check ended: 0\n", ""), ["portable", "avx2"], "did not end well"),
        ("", ["portable"], "the check found []"),
    ],
)
def test_only_a_whole_check_with_the_right_kernels_is_good(output: str, expected: list[str], fault: str) -> None:
    found = fault_in(output, expected)
    assert fault in found
    assert bool(found) == bool(fault)


def test_the_archive_of_files_is_newc() -> None:
    archive = archive_of_files({"init": b"one", "a/longer-name": b"12345678"})
    found, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, n_bytes, n_name = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + n_name]
        assert name.endswith(b"\0")
        at += (110 + n_name + 3) // 4 * 4
        if name == b"TRAILER!!!\0":
            break
        assert mode == 0o100755
        found[name[:-1].decode()] = archive[at : at + n_bytes]
        at += (n_bytes + 3) // 4 * 4
    assert at == len(archive)
    assert found == {"init": b"one", "a/longer-name": b"12345678"}
