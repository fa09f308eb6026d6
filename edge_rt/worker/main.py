"""The worker process: one model, one engine, one channel to the front process.

    python -m edge_rt.worker.main FD

What language models need is loaded for one of them only, and what tensor models need likewise.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

from edge_rt.devices import cpu, memory
from edge_rt.same_package import end_with_parent
from edge_rt.worker.channel import Load
from edge_rt.worker.own_end import WorkerChannel

_OOM_SCORE = 500  # the kernel shall take a model, which comes back, before the daemon and its neighbours


def serve(out: WorkerChannel) -> int:
    """Load the model that the first message names and serve it; give the exit status."""
    first = out.receive()
    if not first or not isinstance(first[0], Load):
        return 1
    load = first[0]
    if load.tensor is not None:
        from edge_rt.worker import tensors

        return tensors.serve(out, load, load.tensor, rss_bytes)
    from edge_rt.worker import tokens

    return tokens.serve(out, load, rss_bytes)


def rss_bytes() -> int:
    return memory.process_rss_bytes().value or 0


def isolate() -> None:
    """Make this process end with its parent, and let the kernel take it before its parent when memory runs out."""
    end_with_parent()
    # The front process says when to stop; a service manager or terminal signals the whole group, which would cut
    # off the answers that are being drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Writing a model-sized core dump would hold up the restart.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(max(int(score.read_text()), _OOM_SCORE)))


def main() -> int:
    fd = int(sys.argv[1])  # the connected socket to the front process
    isolate()
    cpu.prefer_big_cores()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("edge_rt.backends.npu").setLevel(
        logging.INFO
    )  # a chip that is back, or lost where any place will do
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return serve(WorkerChannel(sock))


if __name__ == "__main__":
    sys.exit(main())
