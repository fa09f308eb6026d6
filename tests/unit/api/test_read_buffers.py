from __future__ import annotations

import mmap
import os
import resource
from typing import Any

import pytest

from edge_rt.api.read_buffers import MAX_LENT_BUFFERS, READ_BYTES, Buffer, LentBuffer, ReadBuffers, lent_buffer


def test_a_lent_buffer_can_be_read_by_who_has_its_descriptor_and_not_written() -> None:
    buffer = LentBuffer()
    (fd,) = buffer.fds()
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as seen:
        buffer.memory[5:8] = b"abc"
        assert seen[5:8] == b"abc"
        assert len(seen) == READ_BYTES
        with pytest.raises(TypeError):
            seen[0:1] = b"x"
    for opened in (fd, os.open(f"/proc/self/fd/{fd}", os.O_RDWR)):
        with pytest.raises(PermissionError):
            mmap.mmap(opened, READ_BYTES)
        with pytest.raises(PermissionError):
            os.pwrite(opened, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(opened, 0)
    os.close(opened)
    assert buffer.memory[5:8] == b"abc"
    del buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_without_descriptors_a_buffer_is_this_processs_own() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        buffer = lent_buffer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert type(buffer) is Buffer
    assert len(buffer.memory) == READ_BYTES
    assert type(lent_buffer()) is LentBuffer


def test_only_so_many_are_lent_at_a_time() -> None:
    n_before = LentBuffer.n_alive
    made = [lent_buffer() for _ in range(MAX_LENT_BUFFERS - n_before + 2)]
    assert [type(buffer) for buffer in made[-3:]] == [LentBuffer, Buffer, Buffer]
    made.clear()
    assert type(lent_buffer()) is LentBuffer
    assert LentBuffer.n_alive == n_before


def test_a_buffer_is_used_again_and_its_borrowers_hear_of_those_that_are_not() -> None:
    dropped: list[Any] = []
    buffers = ReadBuffers(LentBuffer)
    taken = [buffers.take() for _ in range(4)]
    assert len({id(buffer) for buffer in (*taken, buffers.current)}) == 5
    for buffer in taken:
        assert isinstance(buffer, LentBuffer)
        buffer.lent_to("worker", dropped.append)
        buffer.lent_to("another", dropped.append)
    assert isinstance(taken[3], LentBuffer)
    taken[3].returned_by("another")
    for buffer in taken:
        buffers.give_back(buffer)
    assert dropped == [taken[2], taken[2], taken[3]]
    buffers.take()
    assert buffers.current is taken[1]
