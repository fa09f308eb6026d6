// Scale the dots of one group of 32 products and add them to their rows' sums, for N_VEC vectors.
//
//   t   = asymmetric ? 16 * dot - z * sum(x) : dot
//   sum = (first ? 0 : sum) + ((t * (16 + f) * m) << e)
//
// m and z are the weights' scale and zero point of that group, f and e the activations' scale, sum(x) that of its 32
// INT8 activations. All is integer, and no sum of up to 512 groups leaves SUM_BITS.
// SHARE = 2 where groups come every other cycle at most: each unit then serves two vectors in turn.
module e4_scale #(
    parameter N_VEC = 8,
    parameter SHARE = 2,
    parameter SUM_BITS = 52,
    parameter WIDE = 0              // multipliers take 27 by 18 bits; else 25 by 18
) (
    input  wire                       clk,
    input  wire                       clear,
    input  wire                       valid,
    input  wire                       first,      // of a row
    input  wire                       last,
    input  wire                       asymmetric,
    input  wire [15:0]                field,      // signed m, or {m[7:0], signed z[7:0]}
    input  wire [17*N_VEC-1:0]        dots,
    input  wire [32*N_VEC-1:0]        records,    // of the activations: {f at 24, e at 16, -sum(x) at 0}
    output reg                        out_valid,
    output wire [SUM_BITS*N_VEC-1:0]  out_sums
);
    localparam UNITS = N_VEC / SHARE;
    localparam F_BITS = 4;
    localparam Z_FRACTION = 4;
    // One vector has multipliers at hand. More take adders for the factors of four bits and eight, two terms a cycle.
    localparam ADDERS = N_VEC > 1;
    localparam T = ADDERS ? 4 : 2;                  // the stage that ends with t,
    localparam S = T + (ADDERS ? 3 : 1);            // with t * (16 + f),
    localparam P = S + (WIDE ? 1 : 2);              // with that times m,
    localparam STAGES = P + 1;                      // and with that shifted

    // A group that has come is held for SHARE cycles; phase says whose turn it is.
    reg held_valid, held_first, held_last, held_asymmetric;
    reg [15:0] held_field;
    reg [17*N_VEC-1:0] held_dots;
    reg [32*N_VEC-1:0] held_records;
    reg phase;
    wire last_phase = (SHARE == 1) || phase;
    always @(posedge clk) begin
        if (valid) begin
            held_first <= first;
            held_last <= last;
            held_asymmetric <= asymmetric;
            held_field <= field;
            held_dots <= dots;
            held_records <= records;
        end
        if (clear) begin
            held_valid <= 1'b0;
            phase <= 1'b0;
        end else begin
            if (valid) held_valid <= 1'b1;
            else if (last_phase) held_valid <= 1'b0;
            phase <= valid ? 1'b0 : 1'b1;
        end
    end

    // What belongs to all units travels beside them. Where weights are symmetric z is 0; where they are not, m is taken
    // 16 times: so one way gives 16 times the product of either kind.
    reg [STAGES:1] p_valid, p_first, p_last, p_phase;
    reg signed [15:0] p_m [1:S];
    integer n;
    always @(posedge clk) begin
        p_valid <= clear ? {STAGES{1'b0}} : {p_valid[STAGES-1:1], held_valid};
        p_first <= {p_first[STAGES-1:1], held_first};
        p_last <= {p_last[STAGES-1:1], held_last};
        p_phase <= {p_phase[STAGES-1:1], phase && SHARE != 1};
        p_m[1] <= held_asymmetric ? {4'b0, held_field[15:8], {Z_FRACTION{1'b0}}} : held_field;
        for (n = 2; n <= S; n = n + 1) p_m[n] <= p_m[n-1];
    end
    wire signed [7:0] z = held_asymmetric ? held_field[7:0] : 8'd0;

    genvar u, v;
    generate
        for (u = 0; u < UNITS; u = u + 1) begin : units
            localparam OTHER = (SHARE == 1) ? u : u + UNITS;
            wire upper = (SHARE != 1) && phase;
            wire signed [16:0] dot = upper ? held_dots[17*OTHER +: 17] : held_dots[17*u +: 17];
            wire [31:0] rec = upper ? held_records[32*OTHER +: 32] : held_records[32*u +: 32];
            wire signed [13:0] minus_x = rec[13:0];

            reg [F_BITS-1:0] p_f [1:T+1];
            reg [2:0] p_e [1:P];
            integer i;
            always @(posedge clk) begin
                p_f[1] <= rec[24 +: F_BITS];
                p_e[1] <= rec[18:16];
                for (i = 2; i <= T + 1; i = i + 1) p_f[i] <= p_f[i-1];
                for (i = 2; i <= P; i = i + 1) p_e[i] <= p_e[i-1];
            end

            reg signed [16:0] dot_1;
            reg signed [20:0] t;
            reg signed [25:0] scaled;
            always @(posedge clk) dot_1 <= dot;
            if (ADDERS) begin : adders
                reg signed [14:0] pair_1 [0:3];     // two bits each of z times -sum(x)
                reg signed [14:0] top_2;
                reg signed [16:0] low_2, low_3, high_2;
                reg signed [17:0] high_3;
                wire [F_BITS-1:0] f = p_f[T], f_next = p_f[T+1];
                reg signed [20:0] t_1;
                reg signed [22:0] low_f1, low_f2;
                reg signed [23:0] high_f1, high_f2;
                wire signed [14:0] x = minus_x;
                wire signed [22:0] t_low = t;
                wire signed [23:0] t_high = t, t_last = t_1;
                always @(posedge clk) begin
                    pair_1[0] <= (z[0] ? x : 15'sd0) + (z[1] ? x <<< 1 : 15'sd0);
                    pair_1[1] <= (z[2] ? x : 15'sd0) + (z[3] ? x <<< 1 : 15'sd0);
                    pair_1[2] <= (z[4] ? x : 15'sd0) + (z[5] ? x <<< 1 : 15'sd0);
                    pair_1[3] <= (z[6] ? x : 15'sd0) - (z[7] ? x <<< 1 : 15'sd0);
                    low_2 <= pair_1[0] + (17'(pair_1[1]) <<< 2);
                    high_2 <= dot_1 + pair_1[2];
                    top_2 <= pair_1[3];
                    low_3 <= low_2;
                    high_3 <= high_2 + (18'(top_2) <<< 2);
                    t <= low_3 + (21'(high_3) <<< Z_FRACTION);
                    low_f1 <= (f[0] ? t_low : 23'sd0) + (f[1] ? t_low <<< 1 : 23'sd0);
                    high_f1 <= (t_high <<< 2) + (f[2] ? t_high : 24'sd0);
                    t_1 <= t;
                    low_f2 <= low_f1;
                    high_f2 <= high_f1 + (f_next[3] ? t_last <<< 1 : 24'sd0);
                    scaled <= low_f2 + (26'(high_f2) <<< 2);
                end
            end else begin : multipliers
                reg signed [20:0] zx_1;
                wire signed [5:0] x_scale = {2'b01, p_f[T]};
                always @(posedge clk) begin
                    zx_1 <= z * minus_x;
                    t <= zx_1 + (dot_1 <<< Z_FRACTION);
                    scaled <= t * x_scale;
                end
            end

            reg signed [40:0] product;
            if (WIDE) begin : whole
                always @(posedge clk) product <= scaled * p_m[S];
            end else begin : parted
                // The 26th bit, odd only where weights are asymmetric, is added.
                wire signed [24:0] most = scaled[25:1];
                reg signed [40:0] most_1;
                reg [10:0] least_1;
                always @(posedge clk) begin
                    most_1 <= most * p_m[S];
                    least_1 <= scaled[0] ? {p_m[S][11:4], 3'b0} : 11'd0;
                    product <= most_1 + $signed({1'b0, least_1});
                end
            end
            // 16 times, or 8 times, the product: no bit that falls away is set.
            localparam SPARE = WIDE ? Z_FRACTION : Z_FRACTION - 1;
            reg signed [SUM_BITS-1:0] shifted;
            always @(posedge clk) shifted <= SUM_BITS'($signed(product[40:SPARE])) <<< p_e[P];
        end
        for (v = 0; v < N_VEC; v = v + 1) begin : accumulators
            reg signed [SUM_BITS-1:0] sum;
            always @(posedge clk)
                if (p_valid[STAGES] && p_phase[STAGES] == (v >= UNITS))
                    sum <= (p_first[STAGES] ? {SUM_BITS{1'b0}} : sum) + units[v % UNITS].shifted;
            assign out_sums[SUM_BITS*v +: SUM_BITS] = sum;
        end
    endgenerate

    always @(posedge clk) out_valid <= !clear && p_valid[STAGES] && p_last[STAGES] && (SHARE == 1 || p_phase[STAGES]);
endmodule
