// A first-in first-out buffer whose head is readable without asking (first word falls through).
// DEPTH is a power of two. Storage infers block RAM where wide and deep, LUT RAM else; the head is a register.
module e4_fifo #(
    parameter WIDTH = 64,
    parameter DEPTH = 256
) (
    input  wire             clk,
    input  wire             clear,
    input  wire             push,
    input  wire [WIDTH-1:0] push_data,
    input  wire             pop,
    output wire             valid,
    output wire [WIDTH-1:0] data,
    output wire             full
);
    localparam LOG = $clog2(DEPTH);

    reg [WIDTH-1:0] storage [0:DEPTH-1];
    reg [LOG:0] n_written, n_read;
    reg [WIDTH-1:0] head, fetched;
    reg head_valid, fetched_valid;

    // Two registers behind the storage: one holds what block RAM gives a cycle after it is asked, one is the head.
    wire stored = n_written != n_read;
    wire head_free = !head_valid || pop;
    wire fetched_free = !fetched_valid || head_free;
    wire fetch = stored && fetched_free;

    assign valid = head_valid;
    assign data = head;
    // By bits: a difference would be computed in DEPTH's 32 bits, and be another one where n_written has wrapped.
    assign full = n_written == {~n_read[LOG], n_read[LOG-1:0]};

    always @(posedge clk) begin
        if (push) storage[n_written[LOG-1:0]] <= push_data;
        if (fetch) fetched <= storage[n_read[LOG-1:0]];
        if (head_free) head <= fetched;
    end

    always @(posedge clk) begin
        if (clear) begin
            n_written <= 0;
            n_read <= 0;
            head_valid <= 1'b0;
            fetched_valid <= 1'b0;
        end else begin
            if (push) n_written <= n_written + 1'b1;
            if (fetch) n_read <= n_read + 1'b1;
            if (fetched_free) fetched_valid <= fetch;
            if (head_free) head_valid <= fetched_valid;
        end
    end
endmodule
