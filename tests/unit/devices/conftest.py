from __future__ import annotations

from tests.device_trees import (
    amd_machine,
    bare_vm,
    container,
    orin_nano,
    plant,
    raspberry_pi_5,
    rk3588,
    x86_hybrid,
    x86_laptop,
    x86_server,
)

__all__ = [
    "amd_machine",
    "bare_vm",
    "container",
    "orin_nano",
    "plant",
    "raspberry_pi_5",
    "rk3588",
    "x86_hybrid",
    "x86_laptop",
    "x86_server",
]
