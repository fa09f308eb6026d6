"""How many cycles a job takes, from first principles and a few small constants; tests hold it to the RTL within 2 %."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.backends.fpga_layout import LINE_BEATS, Layout

FIFO_BEATS = 512
MIN_INTENSITY = 16.0  # multiplications per byte that crosses, for a product to be worth the engine
_FETCH = 4  # states and registers between a write of TAIL and the first address of activations, less the memory's part
_PIPELINE = 32  # from a row's last weight to its sums in the writer,
_ADDERS = 4  # and more where the factors of several vectors are added up


@dataclass(frozen=True, slots=True)
class Engine:
    """What the RTL is built as: a port's width in bits, ports, and vectors."""

    beat_bits: int
    n_ports: int
    n_vectors: int


@dataclass(frozen=True, slots=True)
class Memory:
    """latency_cycles from address to first beat; bytes_per_cycle of all ports, None where the ports are the limit."""

    latency_cycles: int
    bytes_per_cycle: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """An engine of a configuration on a board's memory, as far as they are projected."""

    name: str
    engine: Engine
    memory: Memory
    clock_hz: float


BOARDS = {
    "kv260": Board("kv260-gemm on a KV260", Engine(128, 4, 8), Memory(80, 64.0), 300e6),
    "pynq-z2": Board("z2-gemm on a PYNQ-Z2", Engine(64, 2, 8), Memory(80, 14.0), 150e6),
}


def job_cycles(
    engine: Engine,
    memory: Memory,
    *,
    n_rows: int,
    k: int,
    n_vectors: int,
    group_log2: int = 0,
    block_rows: int = 4,
    max_bursts: int = 8,
) -> float:
    """Estimate the busy cycles of one job that finds the engine idle."""
    layout = Layout(engine.beat_bits, block_rows)
    beat_bytes = engine.beat_bits // 8
    n_places = layout.result_places(n_vectors)
    n_blocks = layout.n_blocks(n_rows)
    weight_bytes = layout.weight_bytes(n_rows, k, group_log2)
    vector_bytes = layout.vector_bytes(k)
    result_bytes = n_blocks * block_rows * n_places * 4

    # A port takes a beat a cycle if enough bursts are under way to cover the latency.
    port_beats = min(1.0, max_bursts * LINE_BEATS / (memory.latency_cycles + LINE_BEATS + 1))
    ports = engine.n_ports * beat_bytes * port_beats
    rate = min(ports, memory.bytes_per_cycle or ports)
    memory_bound = memory.bytes_per_cycle is not None and memory.bytes_per_cycle <= ports

    fetch = memory.latency_cycles + 64 // beat_bytes + _FETCH
    vectors_a_port = -(-n_vectors // engine.n_ports)
    load = max(vectors_a_port * vector_bytes / beat_bytes / port_beats, n_vectors * vector_bytes / rate)
    floats_per_cycle = 2 if engine.beat_bits == 128 and engine.n_vectors > 1 else 1
    row_write = max(1.0, n_places / floats_per_cycle)
    if memory_bound:
        # Weights come while activations do, and lanes catch up; results take their share of the memory.
        early = min(FIFO_BEATS * engine.n_ports * beat_bytes, max(0.0, load * rate - n_vectors * vector_bytes))
        stream = (weight_bytes - early + result_bytes) / rate
    else:
        # Lanes take a beat a cycle from the last activation on, and the port with the most blocks ends last.
        most_blocks = -(-n_blocks // engine.n_ports)
        stream = most_blocks * block_rows * layout.row_bytes(k, group_log2) / beat_bytes / port_beats
    compute = max(stream, n_blocks * block_rows * row_write)
    pipeline = _PIPELINE + (_ADDERS if engine.n_vectors > 1 else 0)
    drain = pipeline + 4 * row_write + n_places * 16 // beat_bytes + memory.latency_cycles
    return fetch + memory.latency_cycles + load + compute + drain
