"""The largest headers that the limits let through, read under a hard limit on the process' address space."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt.catalog.gguf_reader import GgufLimits
from tests.gguf_files import GgufFile, Tensor, tiny_llama, value

LIMITS = GgufLimits()
# The child may take 64 MiB more than it has when Python and the parser are loaded.
CHILD = """
import resource, sys
from pathlib import Path
from edge_rt.catalog.gguf import read_header
from edge_rt.errors import ModelFormatError
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 64 * 2**20, now + 64 * 2**20))
try:
    read_header(Path(sys.argv[1]))
except ModelFormatError as exc:
    print("refused:", exc.problem)
else:
    print("read")
"""


def many_tensors() -> bytes:
    file = tiny_llama()
    n_more = LIMITS.max_tensors - len(file.tensors)
    file.tensors += [Tensor(f"{i:0{LIMITS.max_name_bytes}}", (1, 1, 1, 1)) for i in range(n_more)]
    return file.encode()


def many_values() -> bytes:
    """As many kept values as there may be, each of the kind that Python holds worst: a list of short strings."""
    file = tiny_llama()
    for i in range(LIMITS.max_pairs - len(file.keys)):
        file.set(f"{i:0{LIMITS.max_key_bytes}}", "[string]", ["é"] * 13)
    return file.encode()


def wide_strings() -> bytes:
    """Strings of one emoji and much ASCII: four bytes for each one of the file."""
    file = tiny_llama()
    for i in range(2):
        file.set(f"x{i}", "string", "🙂" + "a" * 900_000)
    return file.encode()


def many_tokens() -> bytes:
    file = tiny_llama()
    n_vocab = LIMITS.max_items
    file.keys["tokenizer.ggml.tokens"] = struct.pack("<IIQ", 9, 8, n_vocab) + bytes(8 * n_vocab)
    file.set("tokenizer.ggml.scores", "[f32]", [0.0] * n_vocab)
    file.set("tokenizer.ggml.token_type", "[i32]", [0] * n_vocab)
    file.tensors = [*file.tensors[1:], Tensor("token_embd.weight", (64, n_vocab), "Q8_0", has_data=False)]
    return file.encode()


def distinct_tokens() -> bytes:
    file = tiny_llama()
    n_vocab = LIMITS.max_items
    file.set("tokenizer.ggml.tokens", "[string]", [str(i) for i in range(n_vocab)])
    file.keys["tokenizer.ggml.scores"] = struct.pack("<IIQ", 9, 6, n_vocab) + bytes(4 * n_vocab)
    file.keys["tokenizer.ggml.token_type"] = struct.pack("<IIQ", 9, 5, n_vocab) + bytes(4 * n_vocab)
    file.tensors = [*file.tensors[1:], Tensor("token_embd.weight", (64, n_vocab), "Q8_0", has_data=False)]
    return file.encode()


def false_promises() -> bytes:
    """Counts that are lies, in a file that is long enough (sparse) for them to be true."""
    file = GgufFile(n_tensors=LIMITS.max_tensors, n_keys=LIMITS.max_pairs)
    file.keys["x"] = struct.pack("<IIQ", 9, 10, 2**24)
    return file.encode()


@pytest.mark.parametrize(
    ("make", "length", "says"),
    [
        (many_tensors, 0, "read"),
        (many_values, 0, "read"),
        (wide_strings, 0, "read"),
        (many_tokens, 2**28, "read"),
        (distinct_tokens, 2**28, "read"),
        (false_promises, 2**28, "refused"),
    ],
)
def test_no_header_takes_more_than_64_mib(make: Callable[[], bytes], length: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        raw = make()
        file.write(raw)
        file.truncate(max(len(raw), length))
    child = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.startswith(says), child.stdout


def test_values_are_counted_as_python_holds_them() -> None:
    """The budget is an honest one: what it allows for an array is what the array takes."""
    numbers = struct.unpack("<2048q", value("[i64]", range(10**12, 10**12 + 2048))[16:])
    assert sum(map(sys.getsizeof, numbers)) + sys.getsizeof(numbers) <= 48 * 2048
