"""Round a float ONNX model's weights to values that 4 bit hold (edge_rt/convert/round_weights.py).

python -m tools.round_weights MODEL.onnx ROUNDED.onnx --manifest models/ID.toml INPUT...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx

from edge_rt.convert.round_weights import round_model
from edge_rt.errors import EdgeRtError
from tools.feeds import Feeds, image_input


def main(argv: Sequence[str] | None = None) -> None:
    """Round a model's file."""
    parser = argparse.ArgumentParser(prog="python -m tools.round_weights", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rounded", type=Path)
    parser.add_argument("inputs", type=Path, nargs="+", help=".npz files, pictures, or folders of them")
    parser.add_argument("--manifest", type=Path, help="whose pipeline prepares the pictures")
    parser.add_argument(
        "--group", type=int, default=0, metavar="N", help="inputs that share a scale [all of an output's]"
    )
    parser.add_argument("--but", action="append", default=[], metavar="NODE", help="leave this one as it is")
    arguments = parser.parse_args(argv)
    try:
        model = onnx.load(str(arguments.model))
        feeds = Feeds(arguments.inputs, model, image_input(arguments.manifest))
        rounded = round_model(
            model, feeds, but=frozenset(arguments.but), group=arguments.group, name=arguments.model.name
        )
    except (EdgeRtError, OSError, ValueError) as exc:
        sys.exit(f"round_weights: {exc}")
    arguments.rounded.write_bytes(rounded.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
