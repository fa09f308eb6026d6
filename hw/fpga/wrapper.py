"""Write the module that Vivado packages: one AXI interface per port, by the names its tools look for.

The engine's read ports lie side by side in wide signals; tools want s_axi_* and m00_axi_*, m01_axi_*, ... with the
signals that AXI has and the engine does not need held at constants.

python -m hw.fpga.wrapper CONFIG > FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hw.fpga.sim.build import CONFIGS, Config, source_hash

MODULE = "e4_top"

_LITE = (
    ("input", "awvalid", 1), ("output", "awready", 1), ("input", "awaddr", 8), ("input", "awprot", 3),
    ("input", "wvalid", 1), ("output", "wready", 1), ("input", "wdata", 32), ("input", "wstrb", 4),
    ("output", "bvalid", 1), ("input", "bready", 1), ("output", "bresp", 2),
    ("input", "arvalid", 1), ("output", "arready", 1), ("input", "araddr", 8), ("input", "arprot", 3),
    ("output", "rvalid", 1), ("input", "rready", 1), ("output", "rdata", 32), ("output", "rresp", 2),
)  # fmt: skip


def _read_signals(config: Config) -> tuple[tuple[str, str, int], ...]:
    return (
        ("output", "arid", 1), ("output", "araddr", config.addr_bits), ("output", "arlen", 8), ("output", "arsize", 3),
        ("output", "arburst", 2), ("output", "arcache", 4), ("output", "arprot", 3), ("output", "arvalid", 1),
        ("input", "arready", 1), ("input", "rid", 1), ("input", "rdata", config.beat_bits), ("input", "rresp", 2),
        ("input", "rlast", 1), ("input", "rvalid", 1), ("output", "rready", 1),
    )  # fmt: skip


def _write_signals(config: Config) -> tuple[tuple[str, str, int], ...]:
    return (
        ("output", "awid", 1), ("output", "awaddr", config.addr_bits), ("output", "awlen", 8), ("output", "awsize", 3),
        ("output", "awburst", 2), ("output", "awcache", 4), ("output", "awprot", 3), ("output", "awvalid", 1),
        ("input", "awready", 1), ("output", "wdata", config.beat_bits), ("output", "wstrb", config.beat_bits // 8),
        ("output", "wlast", 1), ("output", "wvalid", 1), ("input", "wready", 1), ("input", "bid", 1),
        ("input", "bresp", 2), ("input", "bvalid", 1), ("output", "bready", 1),
    )  # fmt: skip


def render(config: Config) -> str:
    """Give the Verilog text for a configuration."""
    return "\n".join(_lines(config)) + "\n"


def _port(direction: str, name: str, bits: int) -> str:
    return f"    {direction} wire {f'[{bits - 1}:0] ' if bits > 1 else ''}{name}"


def _lines(config: Config) -> Iterator[str]:
    masters = [f"m{p:02d}_axi" for p in range(config.n_ports)]
    buses = ":".join(["s_axi", *masters])
    clock_info = f"XIL_INTERFACENAME clk, ASSOCIATED_BUSIF {buses}, ASSOCIATED_RESET resetn"
    ports = [
        f'    (* X_INTERFACE_INFO = "xilinx.com:signal:clock:1.0 clk CLK", X_INTERFACE_PARAMETER = "{clock_info}" *)\n'
        + _port("input", "clk", 1),
        '    (* X_INTERFACE_INFO = "xilinx.com:signal:reset:1.0 resetn RST",'
        ' X_INTERFACE_PARAMETER = "XIL_INTERFACENAME resetn, POLARITY ACTIVE_LOW" *)\n' + _port("input", "resetn", 1),
        '    (* X_INTERFACE_INFO = "xilinx.com:signal:interrupt:1.0 irq INTERRUPT",'
        ' X_INTERFACE_PARAMETER = "XIL_INTERFACENAME irq, SENSITIVITY LEVEL_HIGH" *)\n' + _port("output", "irq", 1),
    ]
    ports += [_port(direction, f"s_axi_{name}", bits) for direction, name, bits in _LITE]
    for p, master in enumerate(masters):
        signals = _read_signals(config) + (_write_signals(config) if p == 0 else ())
        ports += [_port(direction, f"{master}_{name}", bits) for direction, name, bits in signals]
    yield f"// {config.name}: written by `python -m hw.fpga.wrapper {config.name}`"
    yield f"module {MODULE} ("
    yield ",\n".join(ports)
    yield ");"
    yield f"    localparam PORTS = {config.n_ports}, ADDR = {config.addr_bits}, BEAT = {config.beat_bits};"
    yield "    wire [PORTS-1:0] arvalid, arready, arid, rvalid, rready, rid, rlast;"
    yield "    wire [ADDR*PORTS-1:0] araddr;"
    yield "    wire [8*PORTS-1:0] arlen;"
    yield "    wire [BEAT*PORTS-1:0] rdata;"
    yield "    wire [2*PORTS-1:0] rresp;"
    size = (config.beat_bits // 8).bit_length() - 1
    for p, master in enumerate(masters):
        for name, bits in (("arvalid", 1), ("arid", 1), ("rready", 1), ("araddr", config.addr_bits), ("arlen", 8)):
            yield f"    assign {master}_{name} = {name}[{bits * p} +: {bits}];"
        for name, bits in (("arready", 1), ("rvalid", 1), ("rid", 1), ("rlast", 1), ("rdata", config.beat_bits)):
            yield f"    assign {name}[{bits * p} +: {bits}] = {master}_{name};"
        yield f"    assign rresp[{2 * p} +: 2] = {master}_rresp;"
        yield from _constants(master, "ar", size)
    yield from _constants(masters[0], "aw", size)
    yield f"    assign {masters[0]}_awid = 1'b0;"
    parameters = {**config.parameters, "ADDR": "ADDR", "BEAT": "BEAT", "PORTS": "PORTS"}
    parameters["BUILD"] = f"32'h{source_hash()[:8]}"
    yield "    e4_engine #(" + ", ".join(f".{name}({value})" for name, value in parameters.items()) + ") engine ("
    connections = [".clk(clk)", ".resetn(resetn)", ".irq(irq)"]
    connections += [f".s_{name}(s_axi_{name})" for _, name, _ in _LITE if not name.endswith("prot")]
    reads = ("arvalid", "arready", "arid", "araddr", "arlen", "rvalid", "rready", "rid", "rdata", "rresp", "rlast")
    connections += [f".m_{name}({name})" for name in reads]
    skipped = {"awid", "awsize", "awburst", "awcache", "awprot", "bid"}
    connections += [f".m_{name}({masters[0]}_{name})" for _, name, _ in _write_signals(config) if name not in skipped]
    yield ",\n".join(f"        {connection}" for connection in connections) + ");"
    yield "endmodule"


def _constants(master: str, channel: str, size: int) -> Iterator[str]:
    """Bursts that count up, of whole beats; bufferable normal memory, unprivileged, secure, data."""
    yield f"    assign {master}_{channel}size = 3'd{size};"
    yield f"    assign {master}_{channel}burst = 2'b01;"
    yield f"    assign {master}_{channel}cache = 4'b0011;"
    yield f"    assign {master}_{channel}prot = 3'b000;"


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in CONFIGS:
        print(f"python -m hw.fpga.wrapper {'|'.join(CONFIGS)}", file=sys.stderr)
        return 2
    print(render(CONFIGS[sys.argv[1]]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
