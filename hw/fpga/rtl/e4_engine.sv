// INT4 x INT8 matrix-vector engine: registers, runner, writer, and per read port a reader and a lane.
// The AXI signals of the read ports lie side by side, port 0 lowest. A port reads weights with ID 0, activations with ID
// 1. Port 0 also fetches descriptors (ID 1) and writes the results. docs/fpga.md tells the whole story, docs/fpga-registers.md the registers.
module e4_engine #(
    parameter ADDR = 40,
    parameter BEAT = 64,            // bits of a port: 64 or 128
    parameter PORTS = 4,
    parameter N_VEC = 1,            // 1, or even up to 8
    parameter X_DEPTH = 512,        // BEAT/4 activations each: the longest row
    parameter FIFO_DEPTH = 512,     // beats under way and waiting per port
    parameter LUT_PRODUCTS = 0,     // of the BEAT/4 products of a pair of vectors
    parameter WIDE = 0,             // multipliers take 27 by 18 bits, as UltraScale+ has them
    parameter [31:0] BUILD = 0
) (
    input  wire                     clk,
    input  wire                     resetn,
    output wire                     irq,
    // AXI4-Lite
    input  wire                     s_awvalid,
    output wire                     s_awready,
    input  wire [7:0]               s_awaddr,
    input  wire                     s_wvalid,
    output wire                     s_wready,
    input  wire [31:0]              s_wdata,
    input  wire [3:0]               s_wstrb,
    output wire                     s_bvalid,
    input  wire                     s_bready,
    output wire [1:0]               s_bresp,
    input  wire                     s_arvalid,
    output wire                     s_arready,
    input  wire [7:0]               s_araddr,
    output wire                     s_rvalid,
    input  wire                     s_rready,
    output wire [31:0]              s_rdata,
    output wire [1:0]               s_rresp,
    // AXI4 reads
    output wire [PORTS-1:0]         m_arvalid,
    input  wire [PORTS-1:0]         m_arready,
    output wire [PORTS-1:0]         m_arid,
    output wire [ADDR*PORTS-1:0]    m_araddr,
    output wire [8*PORTS-1:0]       m_arlen,
    input  wire [PORTS-1:0]         m_rvalid,
    output wire [PORTS-1:0]         m_rready,
    input  wire [PORTS-1:0]         m_rid,
    input  wire [BEAT*PORTS-1:0]    m_rdata,
    input  wire [2*PORTS-1:0]       m_rresp,
    input  wire [PORTS-1:0]         m_rlast,
    // AXI4 writes, port 0
    output wire                     m_awvalid,
    input  wire                     m_awready,
    output wire [ADDR-1:0]          m_awaddr,
    output wire [7:0]               m_awlen,
    output wire                     m_wvalid,
    input  wire                     m_wready,
    output wire [BEAT-1:0]          m_wdata,
    output wire [BEAT/8-1:0]        m_wstrb,
    output wire                     m_wlast,
    input  wire                     m_bvalid,
    output wire                     m_bready,
    input  wire [1:0]               m_bresp
);
    localparam ROW_BITS = 24;
    localparam SUM_BITS = 52;
    localparam XA = $clog2(X_DEPTH);
    localparam K_MAX_LOG2 = XA + $clog2(BEAT / 4);
    localparam [31:0] CAPS = BEAT / 8 | PORTS << 8 | N_VEC << 12 | K_MAX_LOG2 << 16 | ADDR << 21;

    wire reset = !resetn;
    wire abort, restart, stopped, restarted, irq_done, irq_stopped;
    wire [ADDR-1:0] ring;
    wire [3:0] ring_log2;
    wire [15:0] tail, head;
    wire [31:0] timeout, status, tag;
    wire [4:0] max_bursts;
    wire [63:0] error_addr, n_cycles, n_beats, n_starved, n_gaps;
    e4_registers #(.ADDR(ADDR), .CAPS(CAPS), .BUILD(BUILD)) registers (
        .clk(clk), .reset(reset),
        .awvalid(s_awvalid), .awready(s_awready), .awaddr(s_awaddr),
        .wvalid(s_wvalid), .wready(s_wready), .wdata(s_wdata), .wstrb(s_wstrb),
        .bvalid(s_bvalid), .bready(s_bready), .bresp(s_bresp),
        .arvalid(s_arvalid), .arready(s_arready), .araddr(s_araddr),
        .rvalid(s_rvalid), .rready(s_rready), .rdata(s_rdata), .rresp(s_rresp),
        .irq(irq), .abort(abort), .restart(restart), .ring(ring), .ring_log2(ring_log2), .tail(tail),
        .timeout(timeout), .max_bursts(max_bursts), .head(head), .status(status), .tag(tag), .error_addr(error_addr),
        .n_cycles(n_cycles), .n_beats(n_beats), .n_starved(n_starved), .n_gaps(n_gaps),
        .irq_done(irq_done), .irq_stopped(irq_stopped), .stopped(stopped), .restarted(restarted));

    wire stop, clear, x_ready, asymmetric, four_written, writer_idle, fetch, load;
    wire [15:0] n_groups;
    wire [1:0] group_log2, places_log2;
    wire [2:0] block_log2;
    wire [ADDR-1:0] y_addr, block_addr;
    wire [PORTS-1:0] block_wanted, block_granted, starved, readers_idle, result_valid, result_pop;
    wire [ROW_BITS-1:0] block_row;
    wire [15:0] block_beats;
    localparam VB = $clog2(N_VEC + 1);
    wire [VB*PORTS-1:0] load_vec;
    wire [(XA+1)*PORTS-1:0] load_index;
    wire [PORTS-1:0] x_write, record_write, load_beat, load_error, load_done, loads_idle;
    wire [ADDR*PORTS-1:0] load_addr, load_come_addr;
    wire [XA+1:0] q_beats;
    wire [XA-1:0] record_beats;
    wire [XA+2:0] stride_beats;
    wire [3:0] vectors;
    wire [ROW_BITS*PORTS-1:0] result_row;
    wire [SUM_BITS*N_VEC*PORTS-1:0] result_sums;
    wire [ADDR*PORTS-1:0] weight_addr;

    // Every asked beat has room, so nothing is ever held back.
    assign m_rready = {PORTS{1'b1}};
    assign m_bready = 1'b1;
    assign m_wstrb = {BEAT/8{1'b1}};
    assign load_beat = m_rvalid & m_rid;
    wire [PORTS-1:0] weight_beat = m_rvalid & ~m_rid;
    wire [PORTS-1:0] weight_error;

    genvar p;
    generate
        for (p = 0; p < PORTS; p = p + 1) begin : ports
            wire arvalid, arready, load_arvalid, load_arready, row_push, row_full, popped;
            wire [ADDR-1:0] araddr, load_araddr;
            wire [7:0] arlen, load_arlen;
            wire [ROW_BITS-1:0] row;
            assign weight_error[p] = weight_beat[p] && m_rresp[2*p + 1];
            assign load_error[p] = load_beat[p] && m_rresp[2*p + 1];

            // The loader's addresses first, and whoever was offered stays offered until taken.
            reg locked, locked_load;
            wire from_load = locked ? locked_load : load_arvalid;
            always @(posedge clk) begin
                locked <= !reset && m_arvalid[p] && !m_arready[p];
                locked_load <= from_load;
            end
            assign m_arvalid[p] = from_load ? load_arvalid : arvalid;
            assign m_arid[p] = from_load;
            assign m_araddr[ADDR*p +: ADDR] = from_load ? load_araddr : araddr;
            assign m_arlen[8*p +: 8] = from_load ? load_arlen : arlen;
            assign arready = m_arready[p] && !from_load;
            assign load_arready = m_arready[p] && from_load;

            if (p < N_VEC) begin : loads
                e4_loader #(.ADDR(ADDR), .BEAT(BEAT), .N_VEC(N_VEC), .FIRST(p), .STEP(PORTS), .XA(XA)) loader (
                    .clk(clk), .reset(reset), .clear(clear), .stop(stop), .max_bursts(max_bursts),
                    .fetch(fetch && p == 0), .load(load), .addr(load_addr[ADDR*p +: ADDR]), .q_beats(q_beats),
                    .record_beats(record_beats), .stride_beats(stride_beats), .n_vectors(vectors),
                    .arvalid(load_arvalid), .arready(load_arready), .araddr(load_araddr), .arlen(load_arlen),
                    .rvalid(load_beat[p]), .rlast(m_rlast[p]), .come_addr(load_come_addr[ADDR*p +: ADDR]),
                    .x_write(x_write[p]), .record_write(record_write[p]), .vec(load_vec[VB*p +: VB]),
                    .index(load_index[(XA+1)*p +: XA+1]), .done(load_done[p]), .idle(loads_idle[p]));
            end else begin : no_loads
                assign load_arvalid = 1'b0;
                assign {load_araddr, load_arlen} = {ADDR+8{1'b0}};
                assign {x_write[p], record_write[p], load_done[p], loads_idle[p]} = 4'b0011;
                assign load_vec[VB*p +: VB] = {VB{1'b0}};
                assign load_index[(XA+1)*p +: XA+1] = {XA+1{1'b0}};
                assign load_come_addr[ADDR*p +: ADDR] = {ADDR{1'b0}};
            end
            e4_reader #(.ADDR(ADDR), .BEAT(BEAT), .FIFO_DEPTH(FIFO_DEPTH), .ROW_BITS(ROW_BITS)) reader (
                .clk(clk), .reset(reset), .clear(clear), .stop(stop), .max_bursts(max_bursts),
                .block_wanted(block_wanted[p]), .block_granted(block_granted[p]), .block_addr(block_addr),
                .block_row(block_row), .block_beats(block_beats),
                .row_push(row_push), .row(row), .row_full(row_full),
                .beat_popped(popped), .beat_came(weight_beat[p]), .beat_addr(weight_addr[ADDR*p +: ADDR]),
                .arvalid(arvalid), .arready(arready), .araddr(araddr), .arlen(arlen),
                .burst_ended(weight_beat[p] && m_rlast[p]), .idle(readers_idle[p]));
            e4_lane #(.BEAT(BEAT), .N_VEC(N_VEC), .LOADERS(PORTS), .X_DEPTH(X_DEPTH), .FIFO_DEPTH(FIFO_DEPTH),
                      .LUT_PRODUCTS(LUT_PRODUCTS), .WIDE(WIDE), .SUM_BITS(SUM_BITS), .ROW_BITS(ROW_BITS)) lane (
                .clk(clk), .clear(clear), .x_ready(x_ready), .n_groups(n_groups), .group_log2(group_log2),
                .block_log2(block_log2), .asymmetric(asymmetric),
                .block_push(row_push), .block_row(row), .block_full(row_full),
                .beat_push(weight_beat[p]), .beat_data(m_rdata[BEAT*p +: BEAT]), .beat_pop(popped),
                .x_write(x_write), .record_write(record_write), .load_vec(load_vec), .load_index(load_index),
                .load_data(m_rdata),
                .result_valid(result_valid[p]), .result_row(result_row[ROW_BITS*p +: ROW_BITS]),
                .result_sums(result_sums[SUM_BITS*N_VEC*p +: SUM_BITS*N_VEC]), .result_pop(result_pop[p]),
                .starved(starved[p]));
        end
    endgenerate

    e4_runner #(.ADDR(ADDR), .BEAT(BEAT), .PORTS(PORTS), .N_VEC(N_VEC), .X_DEPTH(X_DEPTH), .ROW_BITS(ROW_BITS)) runner (
        .clk(clk), .reset(reset), .abort(abort), .restart(restart), .ring(ring), .ring_log2(ring_log2), .tail(tail),
        .timeout(timeout), .max_bursts(max_bursts), .head(head), .status(status), .tag(tag), .error_addr(error_addr),
        .n_cycles(n_cycles), .n_beats(n_beats), .n_starved(n_starved), .n_gaps(n_gaps),
        .irq_done(irq_done), .irq_stopped(irq_stopped), .stopped(stopped), .restarted(restarted),
        .stop(stop), .clear(clear), .x_ready(x_ready), .n_groups(n_groups), .group_log2(group_log2),
        .block_log2(block_log2), .asymmetric(asymmetric), .y_addr(y_addr), .places_log2(places_log2),
        .block_wanted(block_wanted), .block_granted(block_granted), .block_addr(block_addr), .block_row(block_row),
        .block_beats(block_beats),
        .fetch(fetch), .load(load), .load_addr(load_addr), .q_beats(q_beats), .record_beats(record_beats),
        .stride_beats(stride_beats), .vectors(vectors), .load_beat(load_beat), .load_error(load_error),
        .load_come_addr(load_come_addr), .load_done(load_done), .load_data(m_rdata[0 +: BEAT]),
        .weight_beat(weight_beat), .weight_error(weight_error), .weight_addr(weight_addr), .starved(starved),
        .reads_idle(readers_idle & loads_idle), .four_written(four_written), .write_answered(m_bvalid),
        .write_error(m_bvalid && m_bresp[1]), .write_addr(m_awaddr), .writer_idle(writer_idle));

    e4_writer #(.ADDR(ADDR), .BEAT(BEAT), .PORTS(PORTS), .N_VEC(N_VEC), .SUM_BITS(SUM_BITS), .ROW_BITS(ROW_BITS)) writer (
        .clk(clk), .reset(reset), .clear(clear), .stop(stop), .y_addr(y_addr), .places_log2(places_log2),
        .result_valid(result_valid), .result_row(result_row), .result_sums(result_sums), .result_pop(result_pop),
        .awvalid(m_awvalid), .awready(m_awready), .awaddr(m_awaddr), .awlen(m_awlen),
        .wvalid(m_wvalid), .wready(m_wready), .wdata(m_wdata), .wlast(m_wlast),
        .answered(m_bvalid), .four_written(four_written), .idle(writer_idle));
endmodule
