// Read one port's row blocks: ask the dispatcher for a block, split it into bursts, keep bursts under way as far as the
// buffer behind has room for every beat that was asked for. A burst never crosses a line of 16 beats, and so no 4 KiB.
module e4_reader #(
    parameter ADDR = 40,
    parameter BEAT = 64,
    parameter FIFO_DEPTH = 512,
    parameter ROW_BITS = 24
) (
    input  wire                clk,
    input  wire                reset,         // the system's; clear is the engine's own
    input  wire                clear,
    input  wire                stop,          // ask for nothing more
    input  wire [4:0]          max_bursts,    // under way at a time, at least 1
    // blocks
    output wire                block_wanted,
    input  wire                block_granted, // in the same cycle
    input  wire [ADDR-1:0]     block_addr,
    input  wire [ROW_BITS-1:0] block_row,
    input  wire [15:0]         block_beats,
    // to the lane's queue of blocks
    output wire                row_push,
    output wire [ROW_BITS-1:0] row,
    input  wire                row_full,
    // buffer
    input  wire                beat_popped,
    input  wire                beat_came,     // from memory
    output wire [ADDR-1:0]     beat_addr,     // where the beat was read that comes next
    // AXI read address
    output wire                arvalid,
    input  wire                arready,
    output wire [ADDR-1:0]     araddr,
    output wire [7:0]          arlen,
    input  wire                burst_ended,   // the last beat of a burst has come
    output wire                idle           // nothing under way
);
    localparam SIZE = $clog2(BEAT / 8);
    localparam FA = $clog2(FIFO_DEPTH);

    reg [ADDR-1:0] addr;
    reg [15:0] n_beats;            // of the block, not asked for yet
    reg [FA:0] n_reserved;         // beats asked for and not computed yet
    reg [4:0] n_bursts;

    wire [4:0] to_line = 5'd16 - {1'b0, addr[SIZE +: 4]};
    wire [4:0] length = n_beats < {11'b0, to_line} ? n_beats[4:0] : to_line;
    reg held;                      // AXI: what was offered stays offered until it is taken
    wire may = n_beats != 0 && !stop && n_bursts < max_bursts && n_reserved + {{(FA-4){1'b0}}, length} <= FIFO_DEPTH;
    assign arvalid = held || may;
    assign araddr = addr;
    assign arlen = {3'b0, length} - 8'd1;
    wire taken = arvalid && arready;

    assign block_wanted = !stop && !row_full && (n_beats == 0 || (taken && n_beats == {11'b0, length}));
    assign row_push = block_granted;
    assign row = block_row;
    assign idle = n_bursts == 0 && !held;

    always @(posedge clk) begin
        if (clear) begin
            n_beats <= 0;
            n_reserved <= 0;
            held <= 1'b0;
        end else begin
            held <= arvalid && !arready;
            if (block_granted) begin
                addr <= block_addr;
                n_beats <= block_beats;
            end else if (taken) begin
                addr <= addr + {{(ADDR-5-SIZE){1'b0}}, length, {SIZE{1'b0}}};
                n_beats <= n_beats - {11'b0, length};
            end
            n_reserved <= n_reserved + (taken ? {{(FA-4){1'b0}}, length} : {(FA+1){1'b0}})
                        - {{FA{1'b0}}, beat_popped};
        end
    end

    // The same blocks again, counted by what comes: an error of memory is told with its address.
    wire came_valid;
    wire [ADDR-1:0] came_base;
    wire [15:0] came_beats;
    reg [15:0] n_came;
    assign beat_addr = came_base + (ADDR'(n_came) << SIZE);
    /* verilator lint_off PINCONNECTEMPTY */
    e4_fifo #(.WIDTH(ADDR + 16), .DEPTH(8)) coming (
        .clk(clk), .clear(clear), .push(block_granted), .push_data({block_addr, block_beats}),
        .pop(beat_came && n_came == came_beats - 1), .valid(came_valid), .data({came_base, came_beats}), .full());
    /* verilator lint_on PINCONNECTEMPTY */
    always @(posedge clk)
        if (clear) n_came <= 0;
        else if (beat_came && came_valid) n_came <= n_came == came_beats - 1 ? 16'd0 : n_came + 1'b1;

    // Bursts under way are counted through every reset but the system's: their beats come all the same.
    always @(posedge clk) n_bursts <= reset ? 5'd0 : n_bursts + {4'b0, taken} - {4'b0, burst_ended};

endmodule
