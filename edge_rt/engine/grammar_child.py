"""The process that compiles grammars on trial: it may take too much time or memory, and is ended then.

    python -m edge_rt.engine.grammar_child LIMITS MAX_S MAX_BYTES

LIMITS are the library's, as JSON. Each grammar comes as its length in four bytes and its text; each is answered with
a line of JSON: the library's problem, or None, and the bytes that the compiled grammar takes. The kernel ends the
process when one takes more than MAX_S of CPU time or MAX_BYTES of memory, which the library cannot be asked to keep.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edge_rt.same_package import end_with_parent

_REST_S: Final = 30.0  # without a grammar, until the process ends: the next one starts another
_MAX_PROBLEM: Final = 4_000
_N_BYTES: Final = 256
_NICENESS: Final = 10  # answers that are being computed come first
_MALLINFO2: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Bytes:
    """The smallest vocabulary. What takes long to compile does so with any."""

    eos_token_id = _N_BYTES
    bos_token_id = None
    special_token_ids = (_N_BYTES, _N_BYTES + 1)
    tokens = (*(bytes([i]) for i in range(_N_BYTES)), b"<end>", b"<control>")

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):  # the library tries whether they are taken
            raise TypeError("text is a str")
        return list(text.encode("utf-8", "replace"))


def heap_bytes() -> Callable[[], int]:
    """Give what counts this process's allocated bytes: of malloc where it tells, else of the pages in memory."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]

    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc, or one before 2.33
        page = os.sysconf("SC_PAGE_SIZE")
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page
    mallinfo.restype = Info

    def count() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return count


def main() -> int:
    limits, max_s, max_bytes = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    end_with_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parser_limits = LLParserLimits(**limits)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_N_BYTES + 2, eos_token=[_N_BYTES])
    count = heap_bytes()
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + max_bytes,) * 2)
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while select.select([source], [], [], _REST_S)[0]:
        head = source.read(4)
        if len(head) < 4:
            break
        text = source.read(int.from_bytes(head, "little")).decode()
        before_bytes = count()
        signal.setitimer(signal.ITIMER_PROF, max_s)  # nobody handles its signal, which ends the process then
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some fail with the first token only
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        problem = str(matcher.get_error())[:_MAX_PROBLEM] if matcher.is_error() else None
        answer = {"problem": problem, "n_bytes": max(0, count() - before_bytes)}
        del matcher
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
