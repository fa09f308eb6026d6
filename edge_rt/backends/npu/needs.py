"""Whether a chip computes in what a form of a model wants, by what its vendor's stack was seen to take. Pure."""

from __future__ import annotations

from edge_rt.backends.npu.vendor import Capabilities, Precision
from edge_rt.tensor_types import ChipNeeds

_FINER = ("", "tensor", "channel", "block")  # scales: who takes the finer ones takes those before
_FLOAT_BITS = 16  # of which a manifest speaks; a chip may have longer ones


def unmet_soc(needs: ChipNeeds, soc: str) -> str | None:
    """Say why a form is not for this chip; None if it is, or nobody tells the chip's name.

    A name may be that of the chip alone where its vendor adds a generation: 57 for 57:75.
    """
    if not needs.socs or not soc or soc in needs.socs or soc.partition(":")[0] in needs.socs:
        return None
    return f"it is for {', '.join(needs.socs)}, and the chip is {soc}"


def unknown_chip(told: Capabilities, chip: str) -> str | None:
    """Say that a compiler takes nothing for a chip, be it the chip's name or an option that it does not know."""
    if told.precisions or not told.is_confirmed:
        return None
    return f"for {chip} the compiler was seen to take nothing, not even a convolution by itself"


def unmet_precision(needs: ChipNeeds, told: Capabilities, chip: str) -> str | None:
    """Say why a chip does not compute in what a form wants; None if it does, or nobody could try.

    chip  names it, for people
    """
    if (unknown := unknown_chip(told, chip)) is not None:
        return unknown
    if not told.precisions or any(_has(precision, needs) for precision in told.precisions):
        return None
    wanted = _shown(needs.weight_bits, needs.activation_bits, needs.granularity)
    have = "; ".join(dict.fromkeys(_shown(p.weight_bits, p.activation_bits, p.granularity) for p in told.precisions))
    tried = "was seen to take" if told.is_confirmed else "is said to take"
    return f"it wants {wanted}, and {chip} {tried} {have}"


def _has(precision: Precision, needs: ChipNeeds) -> bool:
    if needs.weight_bits == needs.activation_bits == _FLOAT_BITS:  # floats have no scales
        return min(precision.weight_bits, precision.activation_bits) >= _FLOAT_BITS
    bits = (precision.weight_bits, precision.activation_bits)
    return bits == (needs.weight_bits, needs.activation_bits) and _index(needs.granularity) <= _index(
        precision.granularity
    )


def _index(granularity: str) -> int:
    return _FINER.index(granularity) if granularity in _FINER else len(_FINER)


def _shown(weight_bits: int, activation_bits: int, granularity: str) -> str:
    if min(weight_bits, activation_bits) >= _FLOAT_BITS:
        return f"floats of {activation_bits} bits"
    scales = {"channel": " with a scale for each channel", "block": " with a scale for each block"}
    return f"{weight_bits}-bit weights{scales.get(granularity, '')} and {activation_bits}-bit activations"
