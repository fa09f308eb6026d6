// Read activations over one port: vectors FIRST, FIRST + STEP, ... each INT8 first and then its groups' records; and, where
// the runner asks for it, one descriptor. Whatever comes is taken, so bursts are bounded by max_bursts alone.
module e4_loader #(
    parameter ADDR = 40,
    parameter BEAT = 64,
    parameter N_VEC = 8,
    parameter FIRST = 0,
    parameter STEP = 4,
    parameter XA = 9
) (
    input  wire                       clk,
    input  wire                       reset,
    input  wire                       clear,
    input  wire                       stop,
    input  wire [4:0]                 max_bursts,
    input  wire                       fetch,            // n_beats from addr, for the runner
    input  wire                       load,             // the vectors
    input  wire [ADDR-1:0]            addr,             // of the descriptor, or of vector FIRST
    input  wire [XA+1:0]              q_beats,          // of a vector
    input  wire [XA-1:0]              record_beats,
    input  wire [XA+2:0]              stride_beats,     // from vector to vector: a multiple of 16
    input  wire [3:0]                 n_vectors,
    output wire                       arvalid,
    input  wire                       arready,
    output wire [ADDR-1:0]            araddr,
    output wire [7:0]                 arlen,
    input  wire                       rvalid,
    input  wire                       rlast,
    output reg  [ADDR-1:0]            come_addr,        // of the beat that comes next
    output wire                       x_write,
    output wire                       record_write,
    output reg  [$clog2(N_VEC+1)-1:0] vec,
    output wire [XA:0]                index,            // beat within the vector's part
    output wire                       done,             // nothing asked for is still to come
    output wire                       idle              // nothing under way
);
    localparam SIZE = $clog2(BEAT / 8);
    localparam FETCH_BEATS = 512 / BEAT;

    reg [ADDR-1:0] ask_addr, ask_vec_addr;
    reg [XA+2:0] n_ask;                                   // of this vector, not asked for yet
    reg [3:0] n_ask_vectors, n_come_vectors;            // this one and those behind it
    reg [XA+2:0] n_come;
    reg [ADDR-1:0] come_vec_addr;
    reg [XA+1:0] n_part;
    reg in_records, vectors;
    reg [4:0] n_bursts;
    reg held;
    wire [XA+2:0] vector_beats = (XA+3)'(q_beats) + (XA+3)'(record_beats);
    wire [ADDR-1:0] step_bytes = ADDR'(stride_beats) << (SIZE + $clog2(STEP));
    wire [3:0] n_mine = n_vectors > FIRST ? (n_vectors - FIRST + STEP - 1) / STEP : 4'd0;

    wire [4:0] length = n_ask < 16 ? n_ask[4:0] : 5'd16;
    assign arvalid = held || (n_ask != 0 && !stop && n_bursts < max_bursts);
    assign araddr = ask_addr;
    assign arlen = {3'd0, length} - 8'd1;
    wire asked = arvalid && arready;
    assign x_write = rvalid && vectors && n_come != 0 && !in_records;
    assign record_write = rvalid && vectors && n_come != 0 && in_records;
    assign index = n_part[XA:0];
    assign done = n_come == 0;
    assign idle = n_bursts == 0 && !held;

    always @(posedge clk) begin
        held <= arvalid && !arready;
        n_bursts <= n_bursts + {4'd0, asked} - {4'd0, rvalid && rlast};
        if (asked) begin
            ask_addr <= ask_addr + {{(ADDR-5-SIZE){1'b0}}, length, {SIZE{1'b0}}};
            n_ask <= n_ask - (XA+3)'(length);
            if (n_ask == (XA+3)'(length) && n_ask_vectors > 4'd1) begin
                ask_addr <= ask_vec_addr + step_bytes;
                ask_vec_addr <= ask_vec_addr + step_bytes;
                n_ask <= vector_beats;
                n_ask_vectors <= n_ask_vectors - 1'b1;
            end
        end
        if (rvalid && n_come != 0) begin
            come_addr <= come_addr + (1 << SIZE);
            n_come <= n_come - 1'b1;
            n_part <= n_part + 1'b1;
            if (!in_records && n_part == q_beats - 1'b1) begin
                in_records <= 1'b1;
                n_part <= 0;
            end
            if (n_come == 1 && n_come_vectors > 4'd1) begin
                come_addr <= come_vec_addr + step_bytes;
                come_vec_addr <= come_vec_addr + step_bytes;
                n_come <= vector_beats;
                n_come_vectors <= n_come_vectors - 1'b1;
                n_part <= 0;
                in_records <= 1'b0;
                vec <= vec + STEP;
            end
        end
        if (fetch || load) begin
            ask_addr <= addr;
            ask_vec_addr <= addr;
            come_addr <= addr;
            come_vec_addr <= addr;
            vectors <= load;
            n_ask <= fetch ? FETCH_BEATS : n_mine == 0 ? 0 : vector_beats;
            n_come <= fetch ? FETCH_BEATS : n_mine == 0 ? 0 : vector_beats;
            n_ask_vectors <= fetch ? 4'd1 : n_mine;
            n_come_vectors <= fetch ? 4'd1 : n_mine;
            vec <= FIRST;
            n_part <= 0;
            in_records <= 1'b0;
        end
        if (clear) begin
            n_ask <= 0;
            n_come <= 0;
        end
        if (reset) begin
            n_bursts <= 5'd0;
            held <= 1'b0;
        end
    end
endmodule
