"""SIMULATED placement in virtual time: the product's own dispatcher on three scripted devices against an oracle.

No real device is measured here. Per seed: a CPU, an NPU and an FPGA of drawn speed and power, all loaded; ten minutes
of requests, evenly and in bursts; windows in which the accelerators fail, and in which one is hot. The product learns
of failures by meeting them and of heat by its probes, every placement.probe_s; it compares its first answers with the
CPU's, as always.

The oracle is told everything before it begins: arrivals, how long each request takes on each device, and every window.
It places all requests offline: first each where it costs least at that time, then by moving single requests between
devices as long as that lowers the sum of all costs, with all the delays that a move causes. The cost is the policy's:
seconds and joules, each relative to the device that is best when idle. A device takes its requests in the order of
arrival. The oracle keeps to one rule of the product: nothing begins on a device that is too hot.

Two bounds that nobody reaches at once are printed beside it: the p99 of an oracle that is out for latency only, and the
J of each request on the cheapest device that is up when it comes, whatever the wait.

Bars, in the median over seeds: p99 latency and J ≤ 1.10 × the oracle's; no request lost in any.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_rt import config
from edge_rt.bench.samples import quantile
from edge_rt.scheduler.placement import WEIGHTS, PolicyName
from edge_rt.tensor_types import TensorRequest
from tests import virtual_time
from tests.null_devices import Device, Window, World, request

AT_MOST = 1.10
N_SEEDS = 20
_SPAN_S = 600.0
_MAX_MOVES_PASSES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """arrivals in seconds; factors: how much longer than usual a request takes, on any device."""

    devices: tuple[dict[str, Any], ...]
    arrivals: tuple[float, ...]
    factors: tuple[float, ...]

    def device(self, at: int) -> Device:
        return Device(**self.devices[at])


def scenario(seed: int, span_s: float) -> Scenario:
    rng = random.Random(seed)
    npu = {"name": "npu", "kind": "npu", "service_s": rng.uniform(0.006, 0.012), "power_w": rng.uniform(3.0, 5.0)}
    fpga = {"name": "fpga", "kind": "fpga", "service_s": rng.uniform(0.012, 0.022), "power_w": rng.uniform(2.0, 3.5)}
    cpu = {"name": "cpu", "kind": "cpu", "service_s": rng.uniform(0.03, 0.05), "power_w": rng.uniform(5.0, 9.0)}
    npu["faults"] = _windows(rng, span_s, n=rng.randint(1, 2), length_s=(10.0, 30.0))
    fpga["faults"] = _windows(rng, span_s, n=1, length_s=(10.0, 30.0))
    npu["fail_s"], fpga["fail_s"] = 0.002, 0.004
    hot = rng.choice((npu, fpga))
    hot["hot"] = _windows(rng, span_s, n=1, length_s=(30.0, 60.0))
    rate_hz = rng.uniform(0.25, 0.45) / npu["service_s"]
    arrivals: list[float] = []
    now_s = 0.0
    while (now_s := now_s + rng.expovariate(rate_hz)) < span_s:
        arrivals.append(now_s)
    for _ in range(round(span_s / 40)):
        start_s, n = rng.uniform(0, span_s), rng.randint(20, 80)
        arrivals += [start_s + rng.uniform(0.0, 0.1) for _ in range(n)]
    arrivals.sort()
    factors = tuple(rng.lognormvariate(0.0, 0.1) for _ in arrivals)
    return Scenario(devices=(npu, fpga, cpu), arrivals=tuple(arrivals), factors=factors)


def _windows(rng: random.Random, span_s: float, *, n: int, length_s: Window) -> tuple[Window, ...]:
    starts = sorted(rng.uniform(0.05, 0.85) * span_s for _ in range(n))
    return tuple((start, start + rng.uniform(*length_s) * span_s / _SPAN_S) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    latencies: tuple[float, ...]
    energy_j: float
    n_lost: int = 0

    @property
    def p99_s(self) -> float:
        return quantile(self.latencies, 0.99)


# -- the product ----------------------------------------------------------------------------------------------------


@dataclass
class _Scripted(World):
    factors: Sequence[float] = ()

    def factor(self, device: Device, request: TensorRequest) -> float:  # noqa: ARG002
        return self.factors[int(request.id[1:])]


def product(given: Scenario, policy: PolicyName, retry_s: float) -> Outcome:
    """Play a scenario with the product's dispatcher."""

    async def main() -> Outcome:
        world = _Scripted(tuple(given.device(i) for i in range(3)), policy=policy, is_probed_late=True)
        world.factors = given.factors
        dispatcher = world.dispatcher(retry_s=retry_s)
        loop = asyncio.get_running_loop()
        await dispatcher.status("m")
        for key in dispatcher.slots("m"):
            await dispatcher._residency.load(key)
        world.origin_s = loop.time()
        latencies: list[float] = []
        n_right = 0

        async def client(number: int, at_s: float) -> None:
            nonlocal n_right
            asked = request(number)
            answer = await dispatcher.infer(asked, loop.time() + 600.0)
            latencies.append(world.now_s() - at_s)
            n_right += answer.outputs[0].data == asked.inputs[0].data

        async with asyncio.TaskGroup() as clients:
            for number, at_s in enumerate(given.arrivals):
                if (wait_s := at_s - world.now_s()) > 0:
                    await asyncio.sleep(wait_s)
                clients.create_task(client(number, at_s))
        energy_j = sum(device.energy_j for device in world.devices)
        return Outcome(latencies=tuple(latencies), energy_j=energy_j, n_lost=len(given.arrivals) - n_right)

    return virtual_time.run(main())


# -- the oracle -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Who computes what. rows[d] are device d's requests in order, ends[i] when request i is done."""

    given: Scenario
    weights: tuple[float, float]
    where: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=lambda: [[], [], []])

    def __post_init__(self) -> None:
        self.specs = [self.given.device(i) for i in range(3)]
        a, b = self.weights
        best = min(self.specs, key=lambda d: d.service_s**a * (d.service_s * d.power_w) ** b)
        self.time_worth = a / best.service_s
        self.energy_worth = b / (best.service_s * best.power_w)
        self.closed = [sorted((*d.faults, *d.hot)) for d in self.specs]

    def start_s(self, device: int, ready_s: float) -> float:
        """Say when a device may begin with what is ready at a time."""
        for begin, end in self.closed[device]:
            if begin <= ready_s < end:
                ready_s = end
        return ready_s

    def energy(self, i: int, device: int) -> float:
        spec = self.specs[device]
        return spec.service_s * self.given.factors[i] * spec.power_w

    def end_s(self, i: int, device: int, free_s: float) -> float:
        begin = self.start_s(device, max(self.given.arrivals[i], free_s))
        return begin + self.specs[device].service_s * self.given.factors[i]

    def cost(self, i: int, device: int, end_s: float) -> float:
        return (end_s - self.given.arrivals[i]) * self.time_worth + self.energy(i, device) * self.energy_worth

    def greedy(self) -> Plan:
        free = [0.0, 0.0, 0.0]
        for i in range(len(self.given.arrivals)):
            device = min(range(3), key=lambda d: self.cost(i, d, self.end_s(i, d, free[d])))
            free[device] = self.end_s(i, device, free[device])
            self.where.append(device)
            self.ends.append(free[device])
            self.rows[device].append(i)
        return self

    def improve(self) -> Plan:
        """Move single requests as long as that lowers the sum of costs."""
        for _ in range(_MAX_MOVES_PASSES):
            at = [0, 0, 0]  # of the next request in each row
            n_moved = 0
            for i in range(len(self.where)):
                home = self.where[i]
                gain, target = 0.0, home
                saved = self._without(i, home, at[home])
                for other in range(3):
                    if other != home and (delta := self._with(i, other, at[other]) - saved) < gain - 1e-9:
                        gain, target = delta, other
                if target != home:
                    n_moved += 1
                    del self.rows[home][at[home]]
                    self._retime(home, at[home])
                    self.rows[target].insert(at[target], i)
                    self.where[i] = target
                    self._retime(target, at[target])
                at[target] += 1
            if not n_moved:
                break
        return self

    def _free_s(self, device: int, at: int) -> float:
        return self.ends[self.rows[device][at - 1]] if at else 0.0

    def _shift(self, device: int, at: int, free_s: float) -> float:
        """Give what it costs those from at on that the device is free at another time."""
        delta = 0.0
        row = self.rows[device]
        for n in range(at, len(row)):
            end = self.end_s(row[n], device, free_s)
            if end == self.ends[row[n]]:
                break
            delta += (end - self.ends[row[n]]) * self.time_worth
            free_s = end
        return delta

    def _without(self, i: int, device: int, at: int) -> float:
        return self.cost(i, device, self.ends[i]) - self._shift(device, at + 1, self._free_s(device, at))

    def _with(self, i: int, device: int, at: int) -> float:
        end = self.end_s(i, device, self._free_s(device, at))
        return self.cost(i, device, end) + self._shift(device, at, end)

    def _retime(self, device: int, at: int) -> None:
        row = self.rows[device]
        free_s = self._free_s(device, at)
        for n in range(at, len(row)):
            end = self.end_s(row[n], device, free_s)
            if n > at and end == self.ends[row[n]]:
                break
            self.ends[row[n]] = free_s = end

    def total(self) -> float:
        return sum(self.cost(i, self.where[i], self.ends[i]) for i in range(len(self.where)))

    def outcome(self) -> Outcome:
        latencies = tuple(end - arrival for end, arrival in zip(self.ends, self.given.arrivals, strict=True))
        energy_j = sum(self.energy(i, device) for i, device in enumerate(self.where))
        return Outcome(latencies=latencies, energy_j=energy_j)


def oracle(given: Scenario, policy: PolicyName) -> Outcome:
    return Plan(given, WEIGHTS[policy]).greedy().improve().outcome()


def least_energy_j(given: Scenario) -> float:
    plan = Plan(given, (0.0, 1.0))
    total = 0.0
    for i, arrival in enumerate(given.arrivals):
        up = [d for d in range(3) if plan.start_s(d, arrival) == arrival]
        total += min(plan.energy(i, device) for device in up)
    return total


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=tuple(WEIGHTS), default="balanced")
    parser.add_argument("--seeds", type=int, default=None, help=f"how many [default: {N_SEEDS}, --quick: 2]")
    parser.add_argument("--first-seed", type=int, default=0, help="seeds are numbered from here [default: 0]")
    default_s = config.Placement().retry_s
    parser.add_argument("--retry-s", type=float, default=default_s, help=f"placement.retry_s [default: {default_s:g}]")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    logging.disable(logging.ERROR)
    own, span_s = arguments.own, 120.0 if arguments.quick else _SPAN_S
    n_seeds = own.seeds or (2 if arguments.quick else N_SEEDS)
    rows: list[dict[str, float]] = []
    for seed in range(own.first_seed, own.first_seed + n_seeds):
        given = scenario(seed, span_s)
        ours, best = product(given, own.policy, own.retry_s), oracle(given, own.policy)
        row = {
            "seed": seed,
            "requests": len(given.arrivals),
            "p99_s": ours.p99_s,
            "oracle_p99_s": best.p99_s,
            "p99_ratio": ours.p99_s / best.p99_s,
            "p99_ratio_to_latency_oracle": ours.p99_s / oracle(given, "latency").p99_s,
            "energy_j": ours.energy_j,
            "oracle_energy_j": best.energy_j,
            "energy_ratio": ours.energy_j / best.energy_j,
            "energy_ratio_to_bound": ours.energy_j / least_energy_j(given),
            "lost": ours.n_lost,
        }
        rows.append(row)
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), file=sys.stderr, flush=True)
    print(f"SIMULATION, policy {own.policy}, {n_seeds} seeds of {span_s:g} virtual seconds: no device was measured.\n")
    harness.finish(
        arguments,
        figures=[
            _figure(rows, "p99 latency", "× oracle", "p99_ratio", AT_MOST),
            _figure(rows, "energy", "× oracle", "energy_ratio", AT_MOST),
            harness.Figure(
                name="requests lost, worst seed", unit="", samples=(max(row["lost"] for row in rows),), at_most=0
            ),
            _figure(rows, "p99 latency", "× latency-only oracle", "p99_ratio_to_latency_oracle", float("inf")),
            _figure(rows, "energy", "× bound", "energy_ratio_to_bound", float("inf")),
        ],
        extra={"simulation": True, "policy": own.policy, "seeds": rows},
    )


def _figure(rows: Sequence[dict[str, float]], name: str, unit: str, key: str, at_most: float) -> harness.Figure:
    return harness.Figure(name=name, unit=unit, samples=tuple(row[key] for row in rows), at_most=at_most)


if __name__ == "__main__":
    main()
