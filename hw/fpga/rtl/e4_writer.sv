// Write results: y[row][place] as FLOAT32, the vectors of a row side by side in 1, 2, 4 or 8 places.
//
// Rows leave a lane in order, and blocks begin at multiples of four. So four rows of a lane are gathered, a number or two a
// cycle, and leave as one burst of 2 to 16 beats (1 to 8 of 128 bits), which is aligned to its size: none crosses 4 KiB.
module e4_writer #(
    parameter ADDR = 40,
    parameter BEAT = 64,
    parameter PORTS = 4,
    parameter N_VEC = 8,
    parameter SUM_BITS = 52,
    parameter ROW_BITS = 24
) (
    input  wire                            clk,
    input  wire                            reset,
    input  wire                            clear,
    input  wire                            stop,          // begin no further burst
    input  wire [ADDR-1:0]                 y_addr,
    input  wire [1:0]                      places_log2,
    input  wire [PORTS-1:0]                result_valid,
    input  wire [ROW_BITS*PORTS-1:0]       result_row,
    input  wire [SUM_BITS*N_VEC*PORTS-1:0] result_sums,
    output reg  [PORTS-1:0]                result_pop,
    output wire                            awvalid,
    input  wire                            awready,
    output wire [ADDR-1:0]                 awaddr,
    output wire [7:0]                      awlen,
    output wire                            wvalid,
    input  wire                            wready,
    output wire [BEAT-1:0]                 wdata,
    output wire                            wlast,
    input  wire                            answered,      // a burst's response has come
    output wire                            four_written,  // rows
    output wire                            idle           // no burst under way
);
    localparam LANE = PORTS > 1 ? $clog2(PORTS) : 1;
    localparam WORDS = BEAT / 32;
    localparam MOST = 1 << $clog2(N_VEC);                  // places
    localparam BEATS = 16 * MOST / (BEAT / 8);             // of four rows
    localparam LATENCY = 4;
    localparam FLOATS = BEAT == 128 && N_VEC > 1 ? 2 : 1;  // a cycle

    // A row's sums, one after the other, become floats.
    reg [SUM_BITS*N_VEC-1:0] line;
    reg [3:0] n_left;
    reg [LANE-1:0] line_lane;
    reg [4:0] place;                                       // within the four rows
    reg [PORTS-1:0] gathering;                             // its fourth row is on its way into the buffer
    reg [PORTS-1:0] full;                                  // four rows wait to be written
    wire [3:0] n_places = 4'd1 << places_log2;
    wire [3:0] n_turns = n_places < FLOATS ? 4'd1 : n_places / FLOATS;
    reg [LANE-1:0] turn, chosen;
    reg found;
    integer i;
    always @* begin
        found = 1'b0;
        chosen = turn;
        for (i = 0; i < PORTS; i = i + 1)
            if (!found && result_valid[(turn + i) % PORTS] && !full[(turn + i) % PORTS]
                       && !gathering[(turn + i) % PORTS]) begin
                found = 1'b1;
                chosen = LANE'((turn + i) % PORTS);
            end
        result_pop = {PORTS{1'b0}};
        if (found && n_left <= 4'd1) result_pop[chosen] = 1'b1;
    end
    wire [ROW_BITS-1:0] row = result_row[ROW_BITS*chosen +: ROW_BITS];
    reg [ROW_BITS-3:0] fours [0:PORTS-1];                  // which four rows a lane's buffer is of
    always @(posedge clk) begin
        if (result_pop != 0) begin
            line <= result_sums[SUM_BITS*N_VEC*chosen +: SUM_BITS*N_VEC];
            line_lane <= chosen;
            n_left <= n_turns;
            place <= 5'(row[1:0]) << places_log2;
            fours[chosen] <= row[ROW_BITS-1:2];
            turn <= LANE'((chosen + 1) % PORTS);
        end else if (n_left != 0) begin
            line <= line >> (SUM_BITS * FLOATS);
            n_left <= n_left - 1'b1;
            place <= place + FLOATS;
        end
        if (clear) begin
            n_left <= 4'd0;
            turn <= {LANE{1'b0}};
        end
    end

    wire [32*FLOATS-1:0] floats;
    genvar f;
    generate
        for (f = 0; f < FLOATS; f = f + 1) begin : converters
            e4_float #(.BITS(SUM_BITS)) convert (
                .clk(clk), .whole(line[SUM_BITS*f +: SUM_BITS]), .float(floats[32*f +: 32]));
        end
    endgenerate
    localparam TAG = 1 + 1 + LANE + 5;
    reg [TAG-1:0] tags [1:LATENCY];
    wire [4:0] last_place = 5'((6'd4 << places_log2) - 6'd1);
    wire [4:0] until_place = n_places < FLOATS ? place : place + FLOATS - 1;
    integer n;
    always @(posedge clk) begin
        tags[1] <= {n_left != 0, until_place == last_place, line_lane, place};
        for (n = 2; n <= LATENCY; n = n + 1) tags[n] <= tags[n-1];
        if (clear) for (n = 1; n <= LATENCY; n = n + 1) tags[n][TAG-1] <= 1'b0;
    end
    wire t_valid, t_last;
    wire [LANE-1:0] t_lane;
    wire [4:0] t_place;
    assign {t_valid, t_last, t_lane, t_place} = tags[LATENCY];

    // Each lane's four rows, beat by beat.
    localparam [1:0] IDLE = 0, ADDRESS = 1, DATA = 2;
    reg [1:0] state;
    reg [LANE-1:0] lane;
    reg [4:0] beat;
    wire [4:0] n_beats = 5'((8'd16 << places_log2) / 8'(BEAT / 8));
    genvar w;
    generate
        for (w = 0; w < WORDS; w = w + 1) begin : words
            reg [31:0] bank [0:PORTS*BEATS-1];
            always @(posedge clk)
                if (t_valid && (t_place % WORDS) / FLOATS == w / FLOATS && (w % FLOATS == t_place % FLOATS || n_places >= FLOATS))
                    bank[t_lane * BEATS + t_place / WORDS] <= floats[32*(n_places < FLOATS ? 0 : w % FLOATS) +: 32];
            assign wdata[32*w +: 32] = bank[lane * BEATS + beat];
        end
    endgenerate

    reg [4:0] n_unanswered;
    reg [LANE-1:0] sender;
    reg some_full;
    always @* begin
        some_full = 1'b0;
        sender = {LANE{1'b0}};
        for (i = PORTS - 1; i >= 0; i = i - 1)
            if (full[i]) begin
                some_full = 1'b1;
                sender = LANE'(i);
            end
    end
    assign awvalid = state == ADDRESS;
    assign awaddr = y_addr + (ADDR'(fours[lane]) << (4 + places_log2));
    assign awlen = {3'd0, n_beats} - 8'd1;
    assign wvalid = state == DATA;
    assign wlast = beat == n_beats - 1'b1;
    assign four_written = wvalid && wready && wlast;
    assign idle = state == IDLE && n_unanswered == 0;

    always @(posedge clk) begin
        if (result_pop != 0 && row[1:0] == 2'd3) gathering[chosen] <= 1'b1;
        if (t_valid && t_last) begin
            gathering[t_lane] <= 1'b0;
            full[t_lane] <= 1'b1;
        end
        if (four_written) full[lane] <= 1'b0;
        case (state)
            IDLE: if (some_full && !stop && n_unanswered < 5'd16) begin
                state <= ADDRESS;
                lane <= sender;
                beat <= 5'd0;
            end
            ADDRESS: if (awready) state <= DATA;
            default: if (wready) begin
                beat <= beat + 1'b1;
                if (wlast) state <= IDLE;
            end
        endcase
        if (reset || clear) begin
            state <= IDLE;
            gathering <= {PORTS{1'b0}};
            full <= {PORTS{1'b0}};
        end
        n_unanswered <= reset ? 5'd0 : n_unanswered + {4'b0, awvalid && awready} - {4'b0, answered};
    end
endmodule
