from __future__ import annotations

from edge_rt import config
from edge_rt.backends.npu import openvino, qnn, rknn


def test_a_run_that_hangs_is_found_out_before_the_worker_is_ended_for_it() -> None:
    stacks = (openvino.STACK, qnn.STACK, rknn.TOOLKIT, rknn.LITE)
    assert max(stack.limits.run_s for stack in stacks) < 0.8 * config.Worker().step_timeout_s
