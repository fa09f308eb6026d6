from __future__ import annotations

import asyncio

from edge_rt.api.rest import QUIET_S, Rest
from tests import virtual_time


def test_memory_goes_back_once_after_the_last_of_many_answers() -> None:
    times: list[float] = []

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        rest = Rest(lambda: times.append(clock()))
        for _ in range(50):
            rest.answered()
            rest.answered()
            await asyncio.sleep(0.4 * QUIET_S)
        last_s = clock()
        assert times == []
        await asyncio.sleep(10 * QUIET_S)
        return last_s

    last_s = virtual_time.run(main())
    assert len(times) == 1
    assert 0.5 * QUIET_S <= times[0] - last_s <= 2 * QUIET_S


def test_each_quiet_time_has_its_own_and_nothing_wakes_the_loop_between_them() -> None:
    times: list[float] = []

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        rest = Rest(lambda: times.append(loop.time()))
        begun: list[float] = []
        for _ in range(3):
            begun.append(loop.time())
            rest.answered()
            await asyncio.sleep(100 * QUIET_S)
        return begun

    begun = virtual_time.run(main())
    assert times == [at_s + QUIET_S for at_s in begun]
