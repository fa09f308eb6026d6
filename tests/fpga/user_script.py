"""Multiply one INT4 matrix by INT8 vectors on the overlay, with pynq and numpy alone: python user_script.py X.bit

It knows nothing of a simulator. Prints one line of JSON.
"""

import json
import sys

import numpy as np
from pynq import MMIO, Clocks, Overlay, allocate

N_ROWS, K, GROUP, BLOCK_ROWS = 128, 512, 32, 4

overlay = Overlay(sys.argv[1])
engine = overlay.e4
registers = engine.register_map
beat = registers.CAPS.BEAT_BYTES
n_vectors = int(registers.CAPS.VECTORS)  # as many as this engine takes: 1 or 8
assert int(registers.ID) == 0x45344731

random = np.random.default_rng(1)
q = random.integers(-8, 8, (N_ROWS, K))
scale = random.integers(-32767, 32768, (N_ROWS, K // GROUP))
x = random.integers(-127, 128, (n_vectors, K))

# A row: beats of 16-bit scales, each followed by the weights of as many groups, two to a byte.
weights = allocate(N_ROWS * (K // GROUP * 2 + K // 2), dtype="u1")
n_fields = beat // 2
nibbles = (q & 15).astype(np.uint8)
packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(N_ROWS, -1, n_fields * GROUP // 2)
scales = scale.astype("<i2").reshape(N_ROWS, -1, n_fields).view(np.uint8)
weights[:] = np.concatenate([scales, packed], axis=2).reshape(-1)
weights.flush()

# Each vector, then the negative sum of each group; then it is filled up to 16 beats.
vectors = allocate((n_vectors, -(-(K + K // GROUP * 4) // (16 * beat)) * 16 * beat), dtype="u1")
vectors[:, :K] = x.astype(np.int8).view(np.uint8)
sums = np.zeros((n_vectors, K // GROUP, 2), "<i2")
sums[:, :, 0] = -x.reshape(n_vectors, -1, GROUP).sum(axis=2)
vectors[:, K : K + K // GROUP * 4] = sums.view(np.uint8).reshape(n_vectors, -1)
vectors.flush()

results = allocate((N_ROWS, n_vectors), dtype="f4")
ring = allocate(16, dtype="u4")
ring[:] = 0
ring[0] = 0xE4D1 | 2 << 20 | n_vectors << 24  # rows go out in blocks of four
ring[1] = K // GROUP
ring[2] = N_ROWS // BLOCK_ROWS
ring[3] = 7
ring[4], ring[5] = weights.device_address & 0xFFFFFFFF, weights.device_address >> 32
ring[6], ring[7] = vectors.device_address & 0xFFFFFFFF, vectors.device_address >> 32
ring[8], ring[9] = results.device_address & 0xFFFFFFFF, results.device_address >> 32
ring.flush()

registers.RING_LO = ring.device_address & 0xFFFFFFFF
registers.RING_HI = ring.device_address >> 32
registers.RING_LOG2 = 0
registers.TIMEOUT = 100_000
mmio = MMIO(engine.mmio.base_addr, 0x1000)
before = mmio.read(0x2C)
mmio.write(0x28, before + 1 & 0xFFFF)
n_polls = 0
while int(registers.HEAD) != (before + 1 & 0xFFFF):
    n_polls += 1
    assert n_polls < 10_000, repr(registers.STATUS)
results.invalidate()

dots = (q[:, None] * x).reshape(N_ROWS, n_vectors, -1, GROUP).sum(axis=3)
expected = (dots * scale[:, None] * 16).sum(axis=2).astype(np.float32)
print(
    json.dumps(
        {
            "n_rows": N_ROWS,
            "n_vectors": n_vectors,
            "n_wrong": int(np.count_nonzero(np.asarray(results) != expected)),
            "n_polls": n_polls,
            "cycles": mmio.read(0x44),
            "tag": int(registers.TAG),
            "status": int(registers.STATUS),
            "beat_bytes": int(beat),
            "build": f"{int(registers.BUILD):08x}",
            "fclk0_mhz": Clocks.fclk0_mhz,
        }
    )
)
