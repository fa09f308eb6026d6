// Products of one beat of INT4 weights with the same places of N_VEC INT8 vectors, summed per vector.
// Fully pipelined; LATENCY = 2 + log2(N_W) cycles from the weights to the sums.
//
// With two vectors or more, one multiplier serves two vectors: x1 * 2^17 + (x0 + 128) times w keeps both sums apart, as no
// sum of 32 products leaves 17 bits (8 * 255 * 32 < 2^16). The upper one is short by the borrow of the lower's sign, and
// the lower one has 128 times the weights' sum too much. With 128 added x0 has no sign, so both fit into a multiplier's
// 25 bits without an adder before it; x0 itself would not, where x1 is -128.
module e4_dots #(
    parameter N_W = 16,
    parameter N_VEC = 8,
    parameter LUT_PRODUCTS = 0  // how many of the N_W products are made of adders: a board's multipliers are few
) (
    input  wire                      clk,
    input  wire [4*N_W-1:0]          w,    // two's complement nibbles, the first in the lowest bits
    input  wire [8*N_W*N_VEC-1:0]    x,    // vector 0's bytes lowest
    output wire [17*N_VEC-1:0]       dots  // signed
);
    localparam LEVELS = $clog2(N_W);
    localparam PAIRED = N_VEC > 1;
    localparam N_SUMS = PAIRED ? N_VEC / 2 : 1;
    localparam SUM_BITS = PAIRED ? 34 : 17;
    localparam PRODUCT_BITS = PAIRED ? 29 : 12;

    reg [4*N_W-1:0] w_q;
    reg [8*N_W*N_VEC-1:0] x_q;
    always @(posedge clk) begin
        w_q <= w;
        x_q <= x;
    end

    genvar s, i, level;
    generate
        // The weights' sum, as many cycles after them as the products' sums.
        if (PAIRED) begin : weights
            wire signed [9:0] terms [0:2*N_W-2];
            for (i = 0; i < N_W; i = i + 1) begin : leaves
                reg signed [3:0] leaf;
                always @(posedge clk) leaf <= w_q[4*i +: 4];
                assign terms[i] = leaf;
            end
            for (level = 1; level <= LEVELS; level = level + 1) begin : tree
                localparam FROM = 2*N_W - (2*N_W >> (level-1));
                localparam TO = 2*N_W - (2*N_W >> level);
                for (i = 0; i < (N_W >> level); i = i + 1) begin : adders
                    reg signed [3+level:0] sum;
                    always @(posedge clk) sum <= terms[FROM + 2*i] + terms[FROM + 2*i + 1];
                    assign terms[TO + i] = sum;
                end
            end
        end
        for (s = 0; s < N_SUMS; s = s + 1) begin : sums
            // Level 0 holds the products; each further level adds neighbours, and a bit.
            wire signed [SUM_BITS-1:0] terms [0:2*N_W-2];
            for (i = 0; i < N_W; i = i + 1) begin : products
                wire signed [3:0] wi = w_q[4*i +: 4];
                if (PAIRED) begin : two
                    wire [7:0] x0 = x_q[8*(N_W*(2*s) + i) +: 8];
                    wire [7:0] x1 = x_q[8*(N_W*(2*s+1) + i) +: 8];
                    wire signed [24:0] both = {x1, 9'd0, ~x0[7], x0[6:0]};
                    reg signed [PRODUCT_BITS-1:0] product;
                    if (i < LUT_PRODUCTS) begin : adders
                        wire signed [28:0] wide = both;
                        always @(posedge clk)
                            product <= (wi[0] ? wide : 29'sd0) + (wi[1] ? wide <<< 1 : 29'sd0)
                                     + (wi[2] ? wide <<< 2 : 29'sd0) - (wi[3] ? wide <<< 3 : 29'sd0);
                    end else begin : multiplier
                        always @(posedge clk) product <= both * wi;
                    end
                    assign terms[i] = product;
                end else begin : one
                    wire signed [7:0] x0 = x_q[8*i +: 8];
                    reg signed [PRODUCT_BITS-1:0] product;
                    always @(posedge clk) product <= x0 * wi;
                    assign terms[i] = product;
                end
            end
            for (level = 1; level <= LEVELS; level = level + 1) begin : tree
                localparam FROM = 2*N_W - (2*N_W >> (level-1));
                localparam TO = 2*N_W - (2*N_W >> level);
                localparam BITS = PRODUCT_BITS + level > SUM_BITS ? SUM_BITS : PRODUCT_BITS + level;
                for (i = 0; i < (N_W >> level); i = i + 1) begin : adders
                    reg signed [BITS-1:0] sum;
                    always @(posedge clk) sum <= terms[FROM + 2*i] + terms[FROM + 2*i + 1];
                    assign terms[TO + i] = sum;
                end
            end
            if (PAIRED) begin : split
                wire [33:0] sum = terms[2*N_W-2];
                assign dots[17*(2*s) +: 17] = {sum[16:7] - weights.terms[2*N_W-2], sum[6:0]};
                assign dots[17*(2*s+1) +: 17] = sum[33:17] + {16'b0, sum[16]};
            end else begin : whole
                assign dots[16:0] = terms[2*N_W-2];
            end
        end
    endgenerate
endmodule
