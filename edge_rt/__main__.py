"""python -m edge_rt"""

from __future__ import annotations

from edge_rt.cli import main

if __name__ == "__main__":
    main(prog_name="edge_rt")
