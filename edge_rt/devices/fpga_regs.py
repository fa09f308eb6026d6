"""The INT4 engine's registers and descriptors: made from hw/fpga/regmap.toml by `python -m hw.fpga.regmap`."""

from typing import Final

ENGINE_ID: Final = 0x45344731
MAP_VERSION: Final = 2
# What BUILD reads in a bitstream of this tree's RTL: the first 32 bits of its sources' SHA-256
BUILD_HASH: Final = 0x140D3065

# Offsets, bytes
ID: Final = 0x00
CAPS: Final = 0x04
BUILD: Final = 0x08
CTRL: Final = 0x0C
STATUS: Final = 0x10
IRQ_ENABLE: Final = 0x14
IRQ_STATUS: Final = 0x18
RING_LO: Final = 0x1C
RING_HI: Final = 0x20
RING_LOG2: Final = 0x24
TAIL: Final = 0x28
HEAD: Final = 0x2C
TIMEOUT: Final = 0x30
MAX_BURSTS: Final = 0x34
ERR_ADDR_LO: Final = 0x38
ERR_ADDR_HI: Final = 0x3C
TAG: Final = 0x40
CYCLES_LO: Final = 0x44
CYCLES_HI: Final = 0x48
BEATS_LO: Final = 0x4C
BEATS_HI: Final = 0x50
STARVED_LO: Final = 0x54
STARVED_HI: Final = 0x58
GAP_LO: Final = 0x5C
GAP_HI: Final = 0x60

# Fields of registers: the lowest bit, and a mask before the shift
CAPS_BEAT_BYTES: Final = (0, 0xFF)
CAPS_PORTS: Final = (8, 0xF)
CAPS_VECTORS: Final = (12, 0xF)
CAPS_K_MAX_LOG2: Final = (16, 0x1F)
CAPS_ADDR_BITS: Final = (21, 0x3F)
CAPS_VERSION: Final = (27, 0x1F)
CTRL_ABORT: Final = (0, 0x1)
CTRL_RESET: Final = (1, 0x1)
STATUS_BUSY: Final = (0, 0x1)
STATUS_DRAINING: Final = (1, 0x1)
STATUS_ABORTED: Final = (2, 0x1)
STATUS_ERR_READ: Final = (3, 0x1)
STATUS_ERR_WRITE: Final = (4, 0x1)
STATUS_ERR_TIMEOUT: Final = (5, 0x1)
STATUS_ERR_CONFIG: Final = (6, 0x1)
STATUS_ERR_PORT: Final = (8, 0xF)
STATUS_ERR_CAUSE: Final = (12, 0xF)
IRQ_STATUS_DONE: Final = (0, 0x1)
IRQ_STATUS_STOPPED: Final = (1, 0x1)

DESCRIPTOR_BYTES: Final = 64
DESCRIPTOR_MAGIC: Final = 0xE4D1
# Fields of descriptors: the word, its lowest bit, and a mask before the shift
DESCRIPTOR_FIELDS: Final = {
    "MAGIC": (0, 0, 0xFFFF),
    "IRQ": (0, 16, 0x1),
    "ASYMMETRIC": (0, 17, 0x1),
    "GROUP_LOG2": (0, 18, 0x3),
    "BLOCK_LOG2": (0, 20, 0x7),
    "VECTORS": (0, 24, 0xF),
    "N_GROUPS": (1, 0, 0xFFFF),
    "N_BLOCKS": (2, 0, 0xFFFFFF),
    "TAG": (3, 0, 0xFFFFFFFF),
    "W_LO": (4, 0, 0xFFFFFFFF),
    "W_HI": (5, 0, 0xFFFFFFFF),
    "X_LO": (6, 0, 0xFFFFFFFF),
    "X_HI": (7, 0, 0xFFFFFFFF),
    "Y_LO": (8, 0, 0xFFFFFFFF),
    "Y_HI": (9, 0, 0xFFFFFFFF),
}

# What STATUS.ERR_CAUSE says
CONFIG_CAUSES: Final = {
    1: "the word 0 does not begin with 0xE4D1: TAIL is beyond what was written, or the ring's address is wrong",
    2: "no vector, or more than the engine has",
    3: "GROUP_LOG2 is 3",
    4: "no group, a row longer than 2^K_MAX_LOG2, or not whole scale groups",
    5: "no block, 2^24 rows or more, or BLOCK_LOG2 outside 2 to 4",
    6: "an address is not aligned",
    7: "a bit without a name is set",
}
