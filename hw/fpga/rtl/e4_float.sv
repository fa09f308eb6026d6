// A signed whole number to IEEE 754 binary32, rounded to nearest, ties to even. LATENCY = 4 cycles, fully pipelined.
module e4_float #(
    parameter BITS = 52
) (
    input  wire            clk,
    input  wire [BITS-1:0] whole,
    output reg  [31:0]     float
);
    reg sign_1, sign_2, sign_3;
    reg [BITS-1:0] size_1, size_2, shifted_3;
    reg [5:0] zeros_2;              // leading ones
    reg [7:0] exponent_3;
    reg [5:0] zeros;
    integer i;
    always @* begin
        zeros = 6'd0;
        for (i = 0; i < BITS; i = i + 1)
            if (size_1[i]) zeros = 6'(BITS - 1 - i);
    end
    wire round_up = shifted_3[BITS-25] && (|shifted_3[BITS-26:0] || shifted_3[BITS-24]);
    wire [30:0] truncated = {exponent_3, shifted_3[BITS-2 -: 23]};
    always @(posedge clk) begin
        sign_1 <= whole[BITS-1];
        size_1 <= whole[BITS-1] ? -whole : whole;
        sign_2 <= sign_1;
        size_2 <= size_1;
        zeros_2 <= zeros;
        sign_3 <= sign_2;
        shifted_3 <= size_2 << zeros_2;
        exponent_3 <= size_2 == 0 ? 8'd0 : 8'(127 + BITS - 1) - {2'b0, zeros_2};
        // A mantissa that overflows carries into the exponent, as it must.
        float <= {sign_3, truncated + {30'd0, round_up}};
    end
endmodule
