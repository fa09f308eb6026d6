// Scale the dots of one group of 32 products and add them to their rows' sums, for N_VEC vectors.
//
//   t   = asymmetric ? 2^Z_FRACTION * dot - z * sum(x) : dot
//   sum = (first ? 0 : sum) + ((t * (2^F_BITS + f) * m) << e)
//
// m and z are the weights' scale and zero point of that group, f and e the activations' scale, sum(x) that of its 32
// INT8 activations. All is integer, and no sum of up to 512 groups leaves SUM_BITS.
// SHARE = 2 where groups come every other cycle at most: each unit then serves two vectors in turn.
module e4_scale #(
    parameter N_VEC = 8,
    parameter SHARE = 2,
    parameter Z_FRACTION = 2,
    parameter SUM_BITS = 52
) (
    input  wire                       clk,
    input  wire                       clear,
    input  wire                       valid,
    input  wire                       first,      // of a row
    input  wire                       last,
    input  wire                       asymmetric,
    input  wire [15:0]                field,      // signed m, or {m[9:0], signed z[5:0]}
    input  wire [17*N_VEC-1:0]        dots,
    input  wire [32*N_VEC-1:0]        records,    // of the activations: {f at 24, e at 16, sum(x) at 0}
    output reg                        out_valid,
    output wire [SUM_BITS*N_VEC-1:0]  out_sums
);
    localparam UNITS = N_VEC / SHARE;
    localparam F_BITS = 4;
    localparam Z_BITS = 6;
    localparam STAGES = 5;

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

    // What belongs to all units travels beside them.
    reg [STAGES:1] p_valid, p_first, p_last, p_phase;
    reg p1_asymmetric;
    reg signed [16:0] p_m [1:3];
    always @(posedge clk) begin
        p_valid <= clear ? {STAGES{1'b0}} : {p_valid[STAGES-1:1], held_valid};
        p_first <= {p_first[STAGES-1:1], held_first};
        p_last <= {p_last[STAGES-1:1], held_last};
        p_phase <= {p_phase[STAGES-1:1], phase && SHARE != 1};
        p1_asymmetric <= held_asymmetric;
        p_m[1] <= held_asymmetric ? {7'b0, held_field[15:6]} : {held_field[15], held_field};
        p_m[2] <= p_m[1];
        p_m[3] <= p_m[2];
    end

    genvar u, v;
    generate
        for (u = 0; u < UNITS; u = u + 1) begin : units
            localparam OTHER = (SHARE == 1) ? u : u + UNITS;
            wire upper = (SHARE != 1) && phase;
            wire signed [16:0] dot = upper ? held_dots[17*OTHER +: 17] : held_dots[17*u +: 17];
            wire [31:0] rec = upper ? held_records[32*OTHER +: 32] : held_records[32*u +: 32];
            wire signed [12:0] sum_x = rec[12:0];
            wire [Z_BITS-1:0] z = held_field[Z_BITS-1:0];

            reg signed [16:0] dot_1;
            reg signed [18:0] zx_1;
            reg [F_BITS-1:0] f_1, f_2;
            reg [2:0] e_1, e_2, e_3, e_4;
            reg signed [19:0] t_2;
            reg signed [24:0] scaled_3;
            reg signed [41:0] product_4;
            reg signed [SUM_BITS-1:0] shifted_5;
            // By four bits and six: adders, where many units would waste multipliers.
            wire signed [18:0] sum_wide = sum_x;
            wire signed [24:0] t_wide = t_2;
            wire signed [18:0] zx, zx_added;
            wire signed [24:0] scaled, scaled_added;
            assign zx_added = (z[0] ? sum_wide : 19'sd0) + (z[1] ? sum_wide <<< 1 : 19'sd0)
                            + (z[2] ? sum_wide <<< 2 : 19'sd0) + (z[3] ? sum_wide <<< 3 : 19'sd0)
                            + (z[4] ? sum_wide <<< 4 : 19'sd0) - (z[5] ? sum_wide <<< 5 : 19'sd0);
            assign scaled_added = (t_wide <<< 4) + (f_2[0] ? t_wide : 25'sd0) + (f_2[1] ? t_wide <<< 1 : 25'sd0)
                                + (f_2[2] ? t_wide <<< 2 : 25'sd0) + (f_2[3] ? t_wide <<< 3 : 25'sd0);
            wire signed [5:0] z_signed = z;
            wire signed [5:0] x_scale = {2'b01, f_2};
            assign zx = N_VEC == 1 ? z_signed * sum_x : zx_added;
            assign scaled = N_VEC == 1 ? t_2 * x_scale : scaled_added;
            always @(posedge clk) begin
                dot_1 <= dot;
                zx_1 <= zx;
                f_1 <= rec[24 +: F_BITS];
                e_1 <= rec[18:16];
                t_2 <= p1_asymmetric ? (dot_1 <<< Z_FRACTION) - zx_1 : 20'(dot_1);
                f_2 <= f_1;
                e_2 <= e_1;
                scaled_3 <= scaled;
                e_3 <= e_2;
                product_4 <= scaled_3 * p_m[3];
                e_4 <= e_3;
                shifted_5 <= SUM_BITS'(product_4) <<< e_4;
            end
        end
        for (v = 0; v < N_VEC; v = v + 1) begin : accumulators
            reg signed [SUM_BITS-1:0] sum;
            always @(posedge clk)
                if (p_valid[STAGES] && p_phase[STAGES] == (v >= UNITS))
                    sum <= (p_first[STAGES] ? {SUM_BITS{1'b0}} : sum) + units[v % UNITS].shifted_5;
            assign out_sums[SUM_BITS*v +: SUM_BITS] = sum;
        end
    endgenerate

    always @(posedge clk) out_valid <= !clear && p_valid[STAGES] && p_last[STAGES] && (SHARE == 1 || p_phase[STAGES]);
endmodule
