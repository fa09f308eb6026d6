from __future__ import annotations

from tests.device_trees import container, plant, raspberry_pi_5, rk3588, x86_hybrid, x86_server

__all__ = ["container", "plant", "raspberry_pi_5", "rk3588", "x86_hybrid", "x86_server"]
