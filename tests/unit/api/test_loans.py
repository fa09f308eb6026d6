from __future__ import annotations

import os
import socket

from edge_rt.api.loans import Loans


def test_a_loan_that_has_ended_leaves_the_number_of_its_descriptor_alone() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        loan = Loans().make(here)
        assert loan is not None
        _, permit = loan.fds()
        loan.permit()
        loan.close()
        read, written = os.pipe2(os.O_NONBLOCK)
        try:
            os.dup2(read, permit)  # the number is another's now
            os.write(written, b"01234567")
            assert loan.take_back()
            assert os.read(permit, 8) == b"01234567"
        finally:
            for fd in {read, written, permit}:
                os.close(fd)
