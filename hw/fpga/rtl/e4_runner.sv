// Run descriptors: fetch one from the ring, check it, load its activations while the ports already read weights, hand
// out blocks of rows, wait until every row is written; on an error or ABORT stop asking, wait for what was asked, clear.
module e4_runner #(
    parameter ADDR = 40,
    parameter BEAT = 64,
    parameter PORTS = 4,
    parameter N_VEC = 8,
    parameter X_DEPTH = 512,
    parameter ROW_BITS = 24
) (
    input  wire                       clk,
    input  wire                       reset,
    // registers
    input  wire                       abort,
    input  wire                       restart,
    input  wire [ADDR-1:0]            ring,
    input  wire [3:0]                 ring_log2,
    input  wire [15:0]                tail,
    input  wire [31:0]                timeout,
    input  wire [4:0]                 max_bursts,
    output reg  [15:0]                head,
    output wire [31:0]                status,
    output wire [31:0]                tag,
    output reg  [63:0]                error_addr,
    output wire [63:0]                n_cycles,
    output wire [63:0]                n_beats,
    output wire [63:0]                n_starved,
    output wire [63:0]                n_gaps,
    output reg                        irq_done,
    output reg                        irq_stopped,
    output reg                        stopped,
    output reg                        restarted,
    // what runs
    output wire                       stop,
    output wire                       clear,
    output wire                       x_ready,
    output wire [15:0]                n_groups,
    output wire [1:0]                 group_log2,
    output wire [2:0]                 block_log2,
    output wire                       asymmetric,
    output wire [ADDR-1:0]            y_addr,
    output wire [1:0]                 places_log2,
    // blocks
    input  wire [PORTS-1:0]           block_wanted,
    output reg  [PORTS-1:0]           block_granted,
    output wire [ADDR-1:0]            block_addr,
    output wire [ROW_BITS-1:0]        block_row,
    output wire [15:0]                block_beats,
    // reads of descriptors, by port 0, and of activations
    output wire                       fetch,
    output wire                       load,
    output wire [ADDR*PORTS-1:0]      load_addr,
    output wire [$clog2(X_DEPTH)+1:0] q_beats,
    output wire [$clog2(X_DEPTH)-1:0] record_beats,
    output wire [$clog2(X_DEPTH)+2:0] stride_beats,
    output wire [3:0]                 vectors,
    input  wire [PORTS-1:0]           load_beat,
    input  wire [PORTS-1:0]           load_error,
    input  wire [ADDR*PORTS-1:0]      load_come_addr,
    input  wire [PORTS-1:0]           load_done,
    input  wire [BEAT-1:0]            load_data,        // port 0's
    // events
    input  wire [PORTS-1:0]           weight_beat,
    input  wire [PORTS-1:0]           weight_error,
    input  wire [ADDR*PORTS-1:0]      weight_addr,
    input  wire [PORTS-1:0]           starved,
    input  wire [PORTS-1:0]           reads_idle,
    input  wire                       four_written,
    input  wire                       write_answered,
    input  wire                       write_error,
    input  wire [ADDR-1:0]            write_addr,
    input  wire                       writer_idle
);
    `include "e4_regs.svh"
    localparam SIZE = $clog2(BEAT / 8);
    localparam XA = $clog2(X_DEPTH);
        localparam [2:0] IDLE = 0, FETCH = 1, CHECK = 2, RUN = 3, FINISH = 4, DRAIN = 5, CLEAR = 6, STOPPED = 7;

    reg [2:0] state;
    reg [511:0] words;
    reg aborted, err_read, err_write, err_timeout, err_config;
    reg [3:0] err_port, err_cause;
    wire busy = state != IDLE && state != STOPPED;
    wire stopping = state == DRAIN || state == CLEAR;
    assign status = {16'd0, err_cause, err_port, 1'b0, err_config, err_timeout, err_write, err_read, aborted, stopping, busy};
    assign stop = stopping || state == STOPPED;
    assign clear = reset || state == CLEAR;

    // The descriptor
    assign tag = words[D_TAG +: 32];
    assign n_groups = words[D_N_GROUPS +: 16];
    assign group_log2 = words[D_GROUP_LOG2 +: 2];
    assign block_log2 = words[D_BLOCK_LOG2 +: 3];
    assign asymmetric = words[D_ASYMMETRIC];
    assign y_addr = words[D_Y_LO +: ADDR];
    assign vectors = words[D_VECTORS +: 4];
    assign places_log2 = N_VEC == 1 || vectors == 1 ? 2'd0 : vectors == 2 ? 2'd1 : vectors <= 4 ? 2'd2 : 2'd3;
    wire [23:0] n_blocks = words[D_N_BLOCKS +: 24];
    wire [27:0] n_rows = {4'd0, n_blocks} << block_log2;
    localparam FIELDS = BEAT / 16, RECORDS = BEAT / 32, GROUP_BEATS = 128 / BEAT;
    localparam GA = XA + 1 - $clog2(GROUP_BEATS);                  // bits of a checked row's groups
    wire [GA-1:0] groups = n_groups[GA-1:0];
    assign q_beats = (XA+2)'(groups) * (2 * GROUP_BEATS);          // of a vector: its INT8 part
    assign record_beats = XA'((groups + RECORDS - 1) / RECORDS);   // and its groups' records
    assign stride_beats = ((XA+3)'(q_beats) + (XA+3)'(record_beats) + (XA+3)'(15)) & ~(XA+3)'(15);
    wire [15:0] row_beats = 16'(groups) * GROUP_BEATS + (16'(groups >> group_log2) + FIELDS - 1) / FIELDS;
    wire ragged = |(n_groups[1:0] & ((2'd1 << group_log2) - 2'd1));
    wire unaligned = |words[D_W_LO +: SIZE + 4] || |words[D_X_LO +: SIZE + 4] || |words[D_Y_LO +: 7];
    wire [3:0] cause =
        words[D_MAGIC +: 16] != DESCRIPTOR_MAGIC ? CAUSE_MAGIC :
        |(words & ~D_USED) ? CAUSE_RESERVED :
        vectors == 0 || vectors > N_VEC ? CAUSE_VECTORS :
        group_log2 == 2'd3 ? CAUSE_GROUP :
        n_groups == 0 || n_groups > X_DEPTH / GROUP_BEATS || ragged ? CAUSE_LENGTH :
        n_blocks == 0 || block_log2 < 3'd2 || block_log2 > 3'd4 || |n_rows[27:24] ? CAUSE_BLOCKS :
        unaligned || |words[D_W_LO + ADDR +: 64 - ADDR] || |words[D_X_LO + ADDR +: 64 - ADDR]
                  || |words[D_Y_LO + ADDR +: 64 - ADDR] ? CAUSE_ALIGNMENT : 4'd0;

    // One state after the order to read, a loader has taken it.
    wire [ADDR-1:0] descriptor_addr = ring + (ADDR'(head & ((16'd1 << ring_log2) - 16'd1)) << 6);
    assign fetch = state == IDLE && head != tail && !restart && !restarted;
    assign load = state == CHECK && cause == 0;
    genvar n;
    generate
        for (n = 0; n < PORTS; n = n + 1) begin : loads
            assign load_addr[ADDR*n +: ADDR] =
                n == 0 && state == IDLE ? descriptor_addr : words[D_X_LO +: ADDR] + (ADDR'(stride_beats * n) << SIZE);
        end
    endgenerate
    assign x_ready = state == RUN && &load_done;

    // Blocks of rows go to whoever asks first.
    reg [ADDR-1:0] next_addr;
    reg [23:0] n_blocks_left;
    reg [ROW_BITS-1:0] next_row;
    reg [ROW_BITS-2:0] n_fours_left;                               // of rows, not written yet
    assign block_addr = next_addr;
    assign block_row = next_row;
    assign block_beats = row_beats << block_log2;
    integer p;
    always @* begin
        block_granted = {PORTS{1'b0}};
        if (state == RUN && n_blocks_left != 0)
            for (p = PORTS - 1; p >= 0; p = p - 1)
                if (block_wanted[p]) block_granted = {{(PORTS-1){1'b0}}, 1'b1} << p;
    end

    reg [43:0] cycles, beats, lane_starved, gaps;
    assign n_cycles = {20'd0, cycles};
    assign n_beats = {20'd0, beats};
    assign n_starved = {20'd0, lane_starved};
    assign n_gaps = {20'd0, gaps};

    reg [31:0] n_quiet;                                            // cycles that may still pass without progress
    wire progress = |weight_beat || |load_beat || write_answered || four_written;
    wire timed_out = timeout != 0 && n_quiet == 0 && busy && !stopping;
    wire failed = |weight_error || |load_error || write_error || timed_out;
    wire all_idle = &reads_idle && writer_idle;

    integer q;
    reg [3:0] n_now, n_hungry;
    always @(posedge clk) begin
        irq_done <= 1'b0;
        irq_stopped <= 1'b0;
        stopped <= 1'b0;
        restarted <= 1'b0;
        n_quiet <= busy && !progress ? n_quiet - 1'b1 : timeout;
        if (|block_granted) begin
            next_addr <= next_addr + (ADDR'(block_beats) << SIZE);
            next_row <= next_row + (ROW_BITS'(1) << block_log2);
            n_blocks_left <= n_blocks_left - 1'b1;
        end
        if (four_written && state == RUN) n_fours_left <= n_fours_left - 1'b1;

        case (state)
            IDLE: if (fetch) state <= FETCH;
            FETCH: begin
                if (load_beat[0]) words <= {load_data, words[511:BEAT]};
                if (load_done[0]) state <= CHECK;
            end
            CHECK: if (cause != 0) begin
                err_config <= 1'b1;
                err_cause <= cause;
                error_addr <= 64'(descriptor_addr);
                state <= DRAIN;
            end else begin
                next_addr <= words[D_W_LO +: ADDR];
                next_row <= 0;
                n_blocks_left <= n_blocks;
                n_fours_left <= n_rows[ROW_BITS:2];
                state <= RUN;
            end
            RUN: if (n_fours_left == 0 && writer_idle) state <= FINISH;
            FINISH: begin
                head <= head + 1'b1;
                irq_done <= words[D_IRQ];
                state <= IDLE;
            end
            DRAIN: if (all_idle) state <= CLEAR;
            CLEAR: begin
                if (restart) begin
                    restarted <= 1'b1;
                    head <= 16'd0;
                    {aborted, err_read, err_write, err_timeout, err_config} <= 5'd0;
                    {err_port, err_cause} <= 8'd0;
                    error_addr <= 64'd0;
                    state <= IDLE;
                end else begin
                    stopped <= 1'b1;
                    irq_stopped <= 1'b1;
                    state <= STOPPED;
                end
            end
            default: ;
        endcase

        if (busy && !stopping && failed) begin
            state <= DRAIN;
            if (|weight_error) begin
                err_read <= 1'b1;
                for (q = PORTS - 1; q >= 0; q = q - 1)
                    if (weight_error[q]) begin
                        err_port <= q;
                        error_addr <= 64'(weight_addr[ADDR*q +: ADDR]);
                    end
            end else if (|load_error) begin
                err_read <= 1'b1;
                for (q = PORTS - 1; q >= 0; q = q - 1)
                    if (load_error[q]) begin
                        err_port <= q;
                        error_addr <= 64'(load_come_addr[ADDR*q +: ADDR]);
                    end
            end else if (write_error) begin
                err_write <= 1'b1;
                error_addr <= 64'(write_addr);
            end else begin
                err_timeout <= 1'b1;
                error_addr <= 64'(descriptor_addr);
            end
        end else if ((abort || restart) && !stopping && !stopped && !restarted) begin
            if (state != STOPPED || restart) begin
                aborted <= aborted || (abort && !restart);
                state <= DRAIN;
            end
            if (state == STOPPED && !restart) stopped <= 1'b1;
        end

        n_now = 0;
        n_hungry = 0;
        for (q = 0; q < PORTS; q = q + 1) begin
            n_now = n_now + weight_beat[q];
            n_hungry = n_hungry + starved[q];
        end
        if (busy) cycles <= cycles + 1'b1;
        if (busy && weight_beat == 0) gaps <= gaps + 1'b1;
        beats <= beats + n_now;
        lane_starved <= lane_starved + n_hungry;
        if (state == CLEAR && restart) {cycles, gaps, beats, lane_starved} <= 176'd0;

        if (reset) begin
            state <= IDLE;
            {aborted, err_read, err_write, err_timeout, err_config} <= 5'd0;
            {err_port, err_cause} <= 8'd0;
            error_addr <= 64'd0;
            head <= 16'd0;
            words <= 512'd0;
            n_quiet <= 32'hffffffff;
            {cycles, gaps, beats, lane_starved} <= 176'd0;
        end
    end
endmodule
