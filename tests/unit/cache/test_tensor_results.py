"""Stored outputs of tensor models: for equal inputs, and for camera frames that nearly are."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from edge_rt.cache.frames import distance, frame_hash
from edge_rt.cache.store import Store
from edge_rt.cache.tensor_results import TensorResults
from edge_rt.config import Cache
from edge_rt.errors import NotCachedError
from edge_rt.tensor_types import Tensor, TensorAnswer, TensorRegion, TensorRequest, TensorTimings
from edge_rt.types import Energy
from tests.fakes import FakeClock
from tests.unit.cache.test_exact import Events

REGION = TensorRegion(name="r", path="/x", device=1, inode=1, offset=0, size_bytes=4)


class Model:
    """Gives the number of its call."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.energy: Energy | None = None

    async def __call__(self) -> TensorAnswer:
        self.n_calls += 1
        out = Tensor(name="y", datatype="INT32", shape=(1,), data=struct.pack("<i", self.n_calls))
        return TensorAnswer(
            outputs=(out,),
            timings=TensorTimings(queue_s=5.0, compute_s=0.4, batch_size=2),
            place="onnx_cpu:0",
            variant="int8",
            energy=self.energy,
        )


class Bench:
    def __init__(self, path: Path, **settings: Any) -> None:
        self.model, self.events, self.wall_clock = Model(), Events(), FakeClock(1e9)
        self.store = Store.open(path, max_bytes=2**20, max_value_bytes=2**20)
        self.results = TensorResults(
            Cache(tensors=True, **settings), self.store, self.events, wall_clock=self.wall_clock
        )

    def infer(self, request: TensorRequest, files: str = "f") -> TensorAnswer:
        return asyncio.run(self.results.infer(request, files, self.model))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "cache.sqlite")
    yield made
    made.store.close()


def tensor(data: bytes = b"\x01\x02\x03\x04", **values: Any) -> Tensor:
    return Tensor(**{"name": "x", "datatype": "UINT8", "shape": (len(data),), "data": data, **values})


def asked(*inputs: Tensor, **values: Any) -> TensorRequest:
    return TensorRequest(**{"id": "1", "model": "m", "inputs": inputs or (tensor(),), **values})


def test_that_equal_inputs_get_the_stored_outputs(bench: Bench) -> None:
    first = bench.infer(asked())
    bench.wall_clock.advance(7)
    again = bench.infer(asked(id="2"))
    assert bench.model.n_calls == 1
    assert again.outputs == first.outputs
    assert (again.place, again.variant, again.age_s, again.similarity) == ("onnx_cpu:0", "int8", 7.0, None)
    assert first.age_s is None
    assert again.timings == TensorTimings(queue_s=0.0, compute_s=0.0, batch_size=1)
    assert bench.events.states == {"miss": 1, "hit-exact": 1}
    assert bench.events.saved_s == pytest.approx(0.2), "its part of the batch"


@pytest.mark.parametrize(
    "other",
    [
        asked(tensor(b"\x01\x02\x03\x05")),
        asked(tensor(datatype="INT8")),
        asked(tensor(shape=(2, 2))),
        asked(tensor(name="z")),
        asked(tensor(), tensor(name="z")),
        asked(tensor(b"\x01\x02"), tensor(b"\x03\x04", name="z")),
        asked(outputs=("y",)),
        asked(model="n"),
        asked(variant="fp32"),
        asked(tenant="uid:1"),
    ],
)
def test_that_what_changes_the_outputs_changes_the_key(bench: Bench, other: TensorRequest) -> None:
    bench.infer(asked())
    bench.infer(other)
    assert bench.model.n_calls == 2
    bench.infer(other)
    assert bench.model.n_calls == 2


def test_that_each_field_of_a_request_has_been_decided_on() -> None:
    keyed = {"model", "inputs", "outputs", "variant", "tenant"}
    never_stored = {"regions", "stream", "is_first", "is_last"}  # the last two mean a stream
    carried = {"id", "deadline_s", "no_cache", "no_store", "only_if_cached", "is_suspect", "reply", "memory"}
    assert {f.name for f in fields(TensorRequest)} == keyed | never_stored | carried


def test_that_another_file_of_the_model_computes_anew(bench: Bench) -> None:
    bench.infer(asked(), "f")
    bench.infer(asked(), "g")
    assert bench.model.n_calls == 2


@pytest.mark.parametrize(
    "request_",
    [
        asked(stream="s"),
        asked(tensor(b"", region=REGION)),
        asked(regions={"y": REGION}),
        asked(no_store=True),
    ],
)
def test_that_streams_and_shared_memory_are_never_stored(bench: Bench, request_: TensorRequest) -> None:
    for _ in range(2):
        bench.infer(request_)
    assert (bench.model.n_calls, len(bench.store)) == (2, 0)
    with pytest.raises(NotCachedError):
        bench.infer(replace(request_, only_if_cached=True))


def test_that_wishes_are_obeyed(bench: Bench) -> None:
    with pytest.raises(NotCachedError):
        bench.infer(asked(only_if_cached=True))
    bench.infer(asked())
    assert bench.infer(asked(only_if_cached=True)).age_s == 0.0
    assert bench.infer(asked(no_cache=True)).age_s is None
    assert bench.infer(asked()).outputs[0].data == struct.pack("<i", 2), "the new outputs took the place of the old"


def test_that_equal_requests_in_flight_share_a_run_but_for_those_that_want_their_own(bench: Bench) -> None:
    async def together(*requests: TensorRequest) -> list[TensorAnswer]:
        turn = asyncio.Event()

        async def compute() -> TensorAnswer:
            await turn.wait()
            return await bench.model()

        asked_ = [asyncio.ensure_future(bench.results.infer(request, "f", compute)) for request in requests]
        for _ in range(10):  # until all wait for the model
            await asyncio.sleep(0)
        turn.set()
        return await asyncio.gather(*asked_)

    one, two = asyncio.run(together(asked(id="1"), asked(id="2")))
    assert one.outputs == two.outputs
    assert (bench.model.n_calls, len(bench.store), bench.events.states) == (1, 1, {"miss": 2})
    for wish in ({"no_cache": True}, {"no_store": True}, {"stream": "s"}):
        n_before = bench.model.n_calls
        asyncio.run(together(asked(**wish), asked(**wish)))
        assert bench.model.n_calls == n_before + 2


def test_that_outputs_get_old_and_large_ones_are_not_kept(bench: Bench, tmp_path: Path) -> None:
    bench.infer(asked())
    bench.wall_clock.advance(24 * 3600)
    bench.infer(asked())
    assert bench.model.n_calls == 2
    small = Bench(tmp_path / "small.sqlite", max_answer_bytes=4)
    small.infer(asked())
    assert small.events.decisions == {"too large": 1}
    small.store.close()


def test_that_large_inputs_are_hashed_beside_the_event_loop(bench: Bench) -> None:
    large = asked(tensor(bytes(2**20)))
    bench.infer(large)
    assert bench.infer(large).age_s == 0.0


# -- camera frames

WIDTH, HEIGHT = 96, 64


def picture(seed: int, *, noise: int = 0, shift: int = 0, brightness: int = 0) -> bytes:
    """Draw grey rectangles, RGB, with a camera's noise."""
    dice, grain = random.Random(seed), random.Random(noise)
    rectangles = [
        (dice.randrange(WIDTH), dice.randrange(HEIGHT), dice.randrange(10, 50), dice.randrange(10, 40))
        for _ in range(8)
    ]
    shades = [dice.randrange(40, 220) for _ in rectangles]
    rows = bytearray()
    for y in range(HEIGHT):
        for x in range(WIDTH):
            value = 30 + x // 2 + y // 2
            for (left, top, w, h), shade in zip(rectangles, shades, strict=True):
                if left <= x - shift < left + w and top <= y < top + h:
                    value = shade
            value += brightness + (grain.randrange(-4, 5) if noise else 0)
            rows += bytes([max(0, min(255, value))]) * 3
    return bytes(rows)


def frame(data: bytes, **values: Any) -> Tensor:
    return tensor(data, shape=(1, HEIGHT, WIDTH, 3), **values)


def _hash(data: bytes) -> int:
    found = frame_hash(frame(data))
    assert found is not None
    return found


def test_that_noise_and_exposure_change_few_bits_and_another_scene_many() -> None:
    base = _hash(picture(1))
    assert max(distance(base, _hash(picture(1, noise=n))) for n in range(1, 6)) <= 6
    assert distance(base, _hash(picture(1, brightness=15))) <= 3
    assert min(distance(base, _hash(picture(seed))) for seed in range(2, 12)) >= 12


def test_that_one_picture_has_one_hash_in_each_layout() -> None:
    rgb = picture(3)
    planes = b"".join(rgb[channel::3] for channel in range(3))
    floats = struct.pack(f"<{len(rgb)}f", *(value / 255 for value in rgb))
    wanted = frame_hash(frame(rgb))
    assert frame_hash(tensor(planes, shape=(3, HEIGHT, WIDTH))) == wanted
    assert frame_hash(tensor(rgb[::3], shape=(HEIGHT, WIDTH, 1))) == wanted
    assert frame_hash(tensor(floats, shape=(HEIGHT, WIDTH, 3), datatype="FP32")) == wanted


@pytest.mark.parametrize(
    "other",
    [
        tensor(bytes(4)),
        tensor(bytes(8 * 8 * 3), shape=(8, 8, 3)),
        tensor(bytes(2 * 64 * 64 * 3), shape=(2, 64, 64, 3)),
        tensor(bytes(64 * 64 * 2), shape=(64, 64, 2)),
        tensor(bytes(64 * 64 * 3), shape=(64, 64, 3), datatype="INT8"),
        tensor(b"", shape=(64, 64, 3), region=REGION),
    ],
)
def test_that_what_is_no_picture_has_no_hash(other: Tensor) -> None:
    assert frame_hash(other) is None


def test_that_a_nearly_equal_frame_gets_the_stored_outputs_where_that_is_wanted(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "near.sqlite", similar_frames=6)
    bench.infer(asked(frame(picture(1))))
    near = bench.infer(asked(frame(picture(1, noise=1))))
    assert bench.model.n_calls == 1
    assert near.similarity is not None
    assert 58 / 64 <= near.similarity <= 1
    assert bench.events.states == {"miss": 1, "hit-semantic": 1}
    assert bench.infer(asked(frame(picture(2)))).age_s is None
    assert bench.infer(asked(frame(picture(1, noise=1)), tensor(b"\x09", name="z"))).age_s is None, "another threshold"
    assert bench.infer(asked(frame(picture(1, noise=1)), tenant="uid:9")).age_s is None
    bench.wall_clock.advance(60)
    assert bench.infer(asked(frame(picture(1, noise=2)))).age_s is None, "a scene is looked at again each minute"
    bench.store.close()


def test_that_frames_are_only_compared_where_that_is_wanted(bench: Bench) -> None:
    bench.infer(asked(frame(picture(1))))
    bench.infer(asked(frame(picture(1, noise=1))))
    assert bench.model.n_calls == 2


def test_that_a_scene_which_changes_slowly_is_computed_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "slow.sqlite", similar_frames=4)
    for shift in range(0, 40, 2):
        bench.infer(asked(frame(picture(1, shift=shift))))
    assert 3 <= bench.model.n_calls < 20
    bench.store.close()


def test_a_hit_saves_the_joules_that_computing_took(bench: Bench) -> None:
    bench.model.energy = Energy(total_j=0.5, above_idle_j=0.25)
    bench.infer(asked())
    bench.infer(asked())
    bench.infer(asked())
    assert bench.events.saved_j == 0.5
    assert bench.infer(asked()).energy is None
