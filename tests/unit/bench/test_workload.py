from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.bench.workload import cases, parse_counts, parse_pairs, token_ids


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", (512,)),
        ("1,2,4", (1, 2, 4)),
        ("1, 2", (1, 2)),
        ("3-5", (3, 4, 5)),
        ("128-512+128", (128, 256, 384, 512)),
        ("128-500+128", (128, 256, 384)),
        ("1-16*2", (1, 2, 4, 8, 16)),
        ("1-20*3", (1, 3, 9)),
        ("0", (0,)),
        ("7-7*1", (7,)),
        ("1-8*2,16,20-22", (1, 2, 4, 8, 16, 20, 21, 22)),
    ],
)
def test_lists_and_ranges(text: str, values: tuple[int, ...]) -> None:
    assert parse_counts(text) == values


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither a number"),
        ("a", "neither a number"),
        ("-1", "neither a number"),
        ("1,,2", "neither a number"),
        ("1-", "neither a number"),
        ("1-4/2", "neither a number"),
        ("1.5", "neither a number"),
        ("٣", "neither a number"),
        ("5-2", "ends before"),
        ("1-4+0", "never reaches"),
        ("1-4*1", "never reaches"),
        ("0-4*2", "never reaches"),
        ("1-99999999", "more than 1024"),
        ("999999999999", "not in 0"),
    ],
)
def test_what_is_no_list_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_counts(text)


def test_least_is_held() -> None:
    with pytest.raises(ValueError, match=r"0 is not in 1\.\."):
        parse_counts("0", least=1)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_a_written_list_reads_back(values: list[int]) -> None:
    assert parse_counts(",".join(map(str, values))) == tuple(values)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_a_sum_range_is_pythons_range(first: int, more: int, step: int) -> None:
    assert parse_counts(f"{first}-{first + more}+{step}") == tuple(range(first, first + more + 1, step))


@given(st.integers(1, 100), st.integers(0, 10**6), st.integers(2, 10))
def test_a_product_range_multiplies_from_first_to_last(first: int, more: int, factor: int) -> None:
    values = parse_counts(f"{first}-{first + more}*{factor}")
    assert values[0] == first
    assert all(b == a * factor for a, b in itertools.pairwise(values))
    assert values[-1] <= first + more < values[-1] * factor


def test_pairs() -> None:
    assert parse_pairs("512,128") == (512, 128)
    for text in ("512", "1,2,3", "1-2", "a,b"):
        with pytest.raises(ValueError):  # noqa: PT011 - the texts differ
            parse_pairs(text)


def _cases(**changes: object) -> list[str]:
    arguments: dict[str, object] = {
        "n_prompt": (512,),
        "n_gen": (128,),
        "pg": (),
        "n_depth": (0,),
        "n_batch": (2048,),
        "n_ubatch": (512,),
        "n_threads": (2,),
    }
    return [f"{c.name} b{c.n_batch} ub{c.n_ubatch} t{c.n_threads}" for c in cases(**(arguments | changes))]  # type: ignore[arg-type]


def test_cases_come_in_llama_benchs_order() -> None:
    assert _cases(pg=[(16, 4)], n_depth=(0, 64), n_threads=(1,)) == [
        "pp512 b2048 ub512 t1",
        "tg128 b2048 ub512 t1",
        "pp16+tg4 b2048 ub512 t1",
        "pp512 @ d64 b2048 ub512 t1",
        "tg128 @ d64 b2048 ub512 t1",
        "pp16+tg4 @ d64 b2048 ub512 t1",
    ]


def test_zero_drops_a_test_and_a_micro_batch_never_exceeds_its_batch() -> None:
    assert _cases(n_prompt=(0,), n_batch=(256, 1024)) == ["tg128 b256 ub256 t2", "tg128 b1024 ub512 t2"]
    assert _cases(n_prompt=(0,), n_gen=(0,)) == []


def test_tokens_are_reproducible_plain_and_in_the_vocabulary() -> None:
    ids = token_ids(200, 50, 7, is_plain=lambda i: i >= 10, first=1)
    assert ids == token_ids(200, 50, 7, is_plain=lambda i: i >= 10, first=1)
    assert ids != token_ids(200, 50, 8, is_plain=lambda i: i >= 10, first=1)
    assert ids[0] == 1
    assert all(10 <= i < 50 for i in ids[1:])
    assert token_ids(0, 50, 7, first=1) == []


def test_a_vocabulary_without_plain_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no plain token"):
        token_ids(1, 50, 7, is_plain=lambda _id: False)
