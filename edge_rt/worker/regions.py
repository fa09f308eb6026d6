"""Tensors in memory that a client shares, read and written by the worker.

By pread and pwrite, not mapped: a mapping of memory that shrinks, or that the system cannot give, ends the process by
SIGBUS; here it is an error of one request. What is read is a copy, so that a client that goes on writing changes
nothing any more once it has been checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import Tensor, TensorRegion


def fetch(tensor: Tensor) -> Tensor:
    """Give a tensor with its bytes in data. Raises InvalidRequestError where they cannot be read."""
    region = tensor.region
    if region is None:
        return tensor
    with _opened(region, os.O_RDONLY) as fd:
        data = os.pread(fd, region.size_bytes, region.offset)
    if len(data) != region.size_bytes:
        raise _unusable(region, f"ends {region.size_bytes - len(data)} bytes before the tensor does")
    return replace(tensor, data=data, region=None)


def put(tensor: Tensor, region: TensorRegion) -> Tensor:
    """Write a tensor's bytes to a region; give it without them. Raises InvalidRequestError, also for lack of room."""
    n_bytes = len(tensor.data)
    if n_bytes > region.size_bytes:
        problem = f"has {region.size_bytes} bytes for output {tensor.name[:80]}, which takes {n_bytes}"
        raise _unusable(region, problem)
    with _opened(region, os.O_WRONLY) as fd:
        n_written = os.pwrite(fd, tensor.data, region.offset)
    if n_written != n_bytes:
        raise _unusable(region, f"took {n_written} of {n_bytes} bytes")
    return replace(tensor, data=b"", region=replace(region, size_bytes=n_bytes))


@contextmanager
def _opened(region: TensorRegion, flags: int) -> Iterator[int]:
    try:
        fd = os.open(region.path, flags | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (region.device, region.inode):
                raise _unusable(region, "is gone: its client has closed it")
            yield fd
        finally:
            os.close(fd)
    except OSError as exc:
        raise _unusable(region, f"cannot be used: {exc.strerror}") from exc


def _unusable(region: TensorRegion, problem: str) -> InvalidRequestError:
    return InvalidRequestError(param=f"shared memory {region.name}", problem=problem)
