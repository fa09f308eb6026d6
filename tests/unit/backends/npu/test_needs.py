"""Whether a chip is one that a form is for."""

from __future__ import annotations

import pytest

from edge_rt.backends.npu.needs import unmet_precision, unmet_soc
from edge_rt.backends.npu.vendor import Capabilities, Precision
from edge_rt.tensor_types import ChipNeeds, Granularity

HTP = Capabilities(
    precisions=(
        Precision(weight_bits=8, activation_bits=8, granularity="channel"),
        Precision(weight_bits=4, activation_bits=16, granularity="channel"),
        Precision(weight_bits=16, activation_bits=16),
    ),
    datatypes=frozenset(["FP32"]),
    is_confirmed=True,
)


def needs(weight_bits: int, activation_bits: int, granularity: Granularity = "", *socs: str) -> ChipNeeds:
    return ChipNeeds(weight_bits=weight_bits, activation_bits=activation_bits, granularity=granularity, socs=socs)


@pytest.mark.parametrize(
    ("wanted", "is_met"),
    [
        (needs(8, 8), True),
        (needs(8, 8, "tensor"), True),
        (needs(4, 16, "channel"), True),
        (needs(16, 16), True),
        (needs(16, 16, "channel"), True),
        (needs(8, 16), False),
        (needs(4, 8), False),
        (needs(4, 16, "block"), False),
    ],
)
def test_bits_and_scales_must_be_among_those_that_it_takes(wanted: ChipNeeds, is_met: bool) -> None:
    assert (unmet_precision(wanted, HTP, "57:75") is None) == is_met


def test_longer_floats_do_for_floats_and_for_nothing_else() -> None:
    cores = Capabilities(precisions=(Precision(weight_bits=32, activation_bits=32),), datatypes=frozenset())
    assert unmet_precision(needs(16, 16), cores, "cores") is None
    told = unmet_precision(needs(8, 8), cores, "cores")
    assert told == "it wants 8-bit weights and 8-bit activations, and cores is said to take floats of 32 bits"


def test_both_sides_are_named() -> None:
    assert unmet_precision(needs(4, 8, "block"), HTP, "57:75") == (
        "it wants 4-bit weights with a scale for each block and 8-bit activations, and 57:75 was seen to take "
        "8-bit weights with a scale for each channel and 8-bit activations; "
        "4-bit weights with a scale for each channel and 16-bit activations; floats of 16 bits"
    )


def test_where_nobody_could_try_nothing_is_refused() -> None:
    assert unmet_precision(needs(4, 16), Capabilities(precisions=(), datatypes=frozenset()), "rk3576") is None


@pytest.mark.parametrize(
    ("socs", "soc", "is_met"),
    [
        ((), "57:75", True),
        (("57:75",), "57:75", True),
        (("57",), "57:75", True),
        (("30:68", "57"), "57:75", True),
        (("57",), "", True),
        (("30:68",), "57:75", False),
        (("5",), "57:75", False),
    ],
)
def test_a_chip_is_known_by_its_name(socs: tuple[str, ...], soc: str, is_met: bool) -> None:
    assert (unmet_soc(needs(8, 8, "", *socs), soc) is None) == is_met
