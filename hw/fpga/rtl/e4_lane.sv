// One port's computing: takes the beats of row blocks from the reader, gives each row's sums for N_VEC vectors.
//
// A row is a sequence of superblocks: one beat of BEAT/16 scale fields, then the weights of as many groups of
// 32 << group_log2, BEAT/4 a beat; the row's last superblock ends with its weights. Rows follow each other without a gap;
// which block they are of comes with a queue of its own, in the order in which the reader has asked for them.
module e4_lane #(
    parameter BEAT = 64,           // bits: 64 or 128
    parameter N_VEC = 8,
    parameter LOADERS = 4,         // vector v comes from loader v % LOADERS
    parameter X_DEPTH = 512,       // words of BEAT/4 activations per vector
    parameter FIFO_DEPTH = 512,
    parameter LUT_PRODUCTS = 0,
    parameter WIDE = 0,
    parameter SUM_BITS = 52,
    parameter ROW_BITS = 24
) (
    input  wire                      clk,
    input  wire                      clear,       // forget everything; nothing must be on its way
    // what runs
    input  wire                      x_ready,
    input  wire [15:0]               n_groups,    // of 32 weights, in a row
    input  wire [1:0]                group_log2,
    input  wire [2:0]                block_log2,
    input  wire                      asymmetric,
    // from the reader
    input  wire                      block_push,
    input  wire [ROW_BITS-1:0]       block_row,
    output wire                      block_full,
    input  wire                      beat_push,
    input  wire [BEAT-1:0]           beat_data,
    output wire                      beat_pop,
    // activations are written by the ports' loaders: halves of words, and BEAT/32 records of groups at a time
    input  wire [LOADERS-1:0]        x_write,
    input  wire [LOADERS-1:0]        record_write,
    input  wire [LOADERS*$clog2(N_VEC+1)-1:0] load_vec,
    input  wire [LOADERS*($clog2(X_DEPTH)+1)-1:0] load_index,
    input  wire [LOADERS*BEAT-1:0]   load_data,
    // results
    output wire                      result_valid,
    output wire [ROW_BITS-1:0]       result_row,
    output wire [SUM_BITS*N_VEC-1:0] result_sums,
    input  wire                      result_pop,
    output wire                      starved      // could compute, has no weights
);
    localparam N_W = BEAT / 4;
    localparam FIELDS = BEAT / 16;
    localparam BEATS_A_GROUP = 32 / N_W;            // of 32 weights: 2 or 1
    localparam SHARE = (BEATS_A_GROUP == 2 && N_VEC > 1) ? 2 : 1;
    localparam XA = $clog2(X_DEPTH);
    localparam GROUPS = X_DEPTH * N_W / 32;
    localparam GA = $clog2(GROUPS);
    localparam RECORDS_A_BEAT = BEAT / 32;
    localparam RA = $clog2(RECORDS_A_BEAT);
    localparam DOT_LATENCY = 2 + $clog2(N_W);
    localparam RESULTS = 8;
    localparam VB = $clog2(N_VEC + 1);

    wire beat_valid;
    wire [BEAT-1:0] beat;
    /* verilator lint_off PINCONNECTEMPTY */
    e4_fifo #(.WIDTH(BEAT), .DEPTH(FIFO_DEPTH)) beats (
        .clk(clk), .clear(clear), .push(beat_push), .push_data(beat_data),
        .pop(beat_pop), .valid(beat_valid), .data(beat), .full());
    /* verilator lint_on PINCONNECTEMPTY */

    // Blocks wait here until their last result has left; computing needs to know only how many have not begun.
    wire block_pop;
    wire [ROW_BITS-1:0] first_row;
    reg [4:0] row_n, out_n;                         // of the block: computed, and leaving
    reg [3:0] n_waiting;
    /* verilator lint_off PINCONNECTEMPTY */
    e4_fifo #(.WIDTH(ROW_BITS), .DEPTH(8)) blocks (
        .clk(clk), .clear(clear), .push(block_push), .push_data(block_row),
        .pop(block_pop), .valid(), .data(first_row), .full(block_full));
    /* verilator lint_on PINCONNECTEMPTY */

    // Where in the row: the beat of the superblock, the word of activations, the row of the block.
    reg [6:0] beat_n;                               // 0 is the scales, then up to 32 of weights with groups of 128
    reg [XA-1:0] x_n;                               // word of activations
    reg [GA-1:0] group_n;                           // group of 32
    reg [16*FIELDS-1:0] fields;
    wire [6:0] last_beat = 7'd8 << group_log2;
    wire [XA:0] n_words = (XA+1)'(n_groups) << (BEATS_A_GROUP - 1);
    wire row_ends = beat_n != 0 && {1'b0, x_n} == n_words - 1'b1;
    wire [4:0] last_row_n = (5'd1 << block_log2) - 1'b1;
    wire row_starts = beat_n == 0 && x_n == 0;
    reg [3:0] n_results;                            // rows begun whose results were not taken
    wire room = !row_starts || n_results < RESULTS;
    wire ready = x_ready && n_waiting != 0 && room;
    assign beat_pop = ready && beat_valid;
    wire block_computed = beat_pop && row_ends && row_n == last_row_n;
    assign block_pop = result_pop && out_n == last_row_n;
    assign result_row = first_row | ROW_BITS'(out_n);   // a block begins at a multiple of its rows
    always @(posedge clk)
        if (clear) begin
            n_waiting <= 0;
            out_n <= 0;
        end else begin
            n_waiting <= n_waiting + {3'b0, block_push} - {3'b0, block_computed};
            if (result_pop) out_n <= out_n == last_row_n ? 5'd0 : out_n + 1'b1;
        end
    assign starved = ready && !beat_valid;

    wire is_weights = beat_pop && beat_n != 0;
    // Within the superblock: which weight beat, whose group of 32 it ends, and which scale field that group has.
    wire [6:0] weight_n = beat_n - 1'b1;
    wire group_starts = (BEATS_A_GROUP == 1) || !weight_n[0];
    wire group_ends = (BEATS_A_GROUP == 1) || weight_n[0];
    wire [6:0] field_n = ((BEATS_A_GROUP == 1) ? weight_n : weight_n >> 1) >> group_log2;

    always @(posedge clk) begin
        if (beat_pop && beat_n == 0) fields <= beat;
        if (clear) begin
            beat_n <= 0;
            row_n <= 0;
            x_n <= 0;
            group_n <= 0;
        end else if (beat_pop) begin
            beat_n <= beat_n == last_beat || row_ends ? 7'd0 : beat_n + 1'b1;
            if (is_weights) begin
                x_n <= row_ends ? {XA{1'b0}} : x_n + 1'b1;
                if (group_ends) group_n <= row_ends ? {GA{1'b0}} : group_n + 1'b1;
            end
            if (row_ends) row_n <= row_n == last_row_n ? 5'd0 : row_n + 1'b1;
        end
    end

    // Stage 1: the activations' words come out of memory while the weights wait a cycle.
    reg [BEAT-1:0] w_1, w_2;
    wire [8*N_W*N_VEC-1:0] x_1;
    reg [8*N_W*N_VEC-1:0] x_2;
    genvar v, half;
    generate
        for (v = 0; v < N_VEC; v = v + 1) begin : vectors
            localparam FROM = v % LOADERS;
            wire [XA:0] at = load_index[(XA+1)*FROM +: XA+1];
            wire mine = load_vec[VB*FROM +: VB] == v;
            for (half = 0; half < 2; half = half + 1) begin : halves
                reg [BEAT-1:0] words [0:X_DEPTH-1];
                reg [BEAT-1:0] word;
                always @(posedge clk) begin
                    if (x_write[FROM] && mine && at[0] == half) words[at[XA:1]] <= load_data[BEAT*FROM +: BEAT];
                    word <= words[x_n];
                end
                assign x_1[8*N_W*v + BEAT*half +: BEAT] = word;
            end
        end
    endgenerate
    always @(posedge clk) begin
        w_1 <= beat;
        w_2 <= w_1;
        x_2 <= x_1;
    end

    wire [17*N_VEC-1:0] beat_dots;
    e4_dots #(.N_W(N_W), .N_VEC(N_VEC), .LUT_PRODUCTS(LUT_PRODUCTS)) products (.clk(clk), .w(w_2), .x(x_2), .dots(beat_dots));

    // What belongs to a beat travels beside it, from the cycle of its pop to that of its dots.
    localparam TRAVEL = 2 + DOT_LATENCY;
    localparam TAG = 5 + 16 + GA;
    reg row_first;                                  // the row's first group of 32 is under way
    always @(posedge clk)
        if (clear) row_first <= 1'b1;
        else if (is_weights && group_ends) row_first <= row_ends;
    wire [TAG-1:0] tag = {is_weights, group_starts, group_ends, row_first, row_ends,
                          fields[16*field_n[$clog2(FIELDS)-1:0] +: 16], group_n};
    reg [TAG-1:0] tags [1:TRAVEL];
    integer n;
    always @(posedge clk) begin
        tags[1] <= tag;
        for (n = 2; n <= TRAVEL; n = n + 1) tags[n] <= tags[n-1];
        if (clear) for (n = 1; n <= TRAVEL; n = n + 1) tags[n][TAG-1] <= 1'b0;
    end

    // The records of a group are asked for a cycle ahead of its dots are whole.
    wire [GA-1:0] record_n = tags[TRAVEL-1][GA-1:0];
    wire [32*N_VEC-1:0] records;
    generate
        for (v = 0; v < N_VEC; v = v + 1) begin : record_vectors
            localparam FROM = v % LOADERS;
            wire [XA:0] at = load_index[(XA+1)*FROM +: XA+1];
            wire mine = load_vec[VB*FROM +: VB] == v;
            for (half = 0; half < RECORDS_A_BEAT; half = half + 1) begin : banks
                reg [31:0] bank [0:(GROUPS >> RA)-1];
                reg [31:0] out;
                always @(posedge clk) begin
                    if (record_write[FROM] && mine) bank[at[GA-RA-1:0]] <= load_data[BEAT*FROM + 32*half +: 32];
                    out <= bank[record_n[GA-1:RA]];
                end
            end
            wire [32*RECORDS_A_BEAT-1:0] outs;
            for (half = 0; half < RECORDS_A_BEAT; half = half + 1) begin : joined
                assign outs[32*half +: 32] = banks[half].out;
            end
            assign records[32*v +: 32] = outs[32*tags[TRAVEL][RA-1:0] +: 32];
        end
    endgenerate

    wire t_valid, t_starts, t_ends, t_first, t_last;
    wire [15:0] t_field;
    wire [GA-1:0] t_group;
    assign {t_valid, t_starts, t_ends, t_first, t_last, t_field, t_group} = tags[TRAVEL];

    // Beats to groups of 32.
    wire [17*N_VEC-1:0] group_dots;
    generate
        for (v = 0; v < N_VEC; v = v + 1) begin : group_sums
            if (BEATS_A_GROUP == 1) begin : one
                assign group_dots[17*v +: 17] = beat_dots[17*v +: 17];
            end else begin : two
                reg signed [16:0] first_half;
                always @(posedge clk) if (t_valid && t_starts) first_half <= beat_dots[17*v +: 17];
                assign group_dots[17*v +: 17] = first_half + beat_dots[17*v +: 17];
            end
        end
    endgenerate

    wire row_valid;
    wire [SUM_BITS*N_VEC-1:0] row_sums;
    e4_scale #(.N_VEC(N_VEC), .SHARE(SHARE), .SUM_BITS(SUM_BITS), .WIDE(WIDE)) scale (
        .clk(clk), .clear(clear), .valid(t_valid && t_ends), .first(t_first), .last(t_last),
        .asymmetric(asymmetric), .field(t_field), .dots(group_dots), .records(records),
        .out_valid(row_valid), .out_sums(row_sums));

    /* verilator lint_off PINCONNECTEMPTY */
    e4_fifo #(.WIDTH(SUM_BITS*N_VEC), .DEPTH(RESULTS)) results (
        .clk(clk), .clear(clear), .push(row_valid), .push_data(row_sums),
        .pop(result_pop), .valid(result_valid), .data(result_sums), .full());
    /* verilator lint_on PINCONNECTEMPTY */

    always @(posedge clk)
        if (clear) n_results <= 0;
        else n_results <= n_results + {3'b0, beat_pop && row_starts} - {3'b0, result_pop};
endmodule
