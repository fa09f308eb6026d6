// The AXI4-Lite side: registers, and what they hold. regmap.toml says what each one is.
module e4_registers #(
    parameter ADDR = 40,
    parameter [31:0] CAPS = 0,
    parameter [31:0] BUILD = 0
) (
    input  wire            clk,
    input  wire            reset,
    input  wire            awvalid,
    output wire            awready,
    input  wire [7:0]      awaddr,
    input  wire            wvalid,
    output wire            wready,
    input  wire [31:0]     wdata,
    input  wire [3:0]      wstrb,
    output reg             bvalid,
    input  wire            bready,
    output reg  [1:0]      bresp,
    input  wire            arvalid,
    output wire            arready,
    input  wire [7:0]      araddr,
    output reg             rvalid,
    input  wire            rready,
    output reg  [31:0]     rdata,
    output reg  [1:0]      rresp,
    output wire            irq,
    // to the runner
    output reg             abort,       // until it says stopped
    output reg             restart,     // likewise
    output wire [ADDR-1:0] ring,
    output reg  [3:0]      ring_log2,
    output reg  [15:0]     tail,
    output reg  [31:0]     timeout,
    output reg  [4:0]      max_bursts,
    // from the runner
    input  wire [15:0]     head,
    input  wire [31:0]     status,
    input  wire [31:0]     tag,
    input  wire [63:0]     error_addr,
    input  wire [63:0]     n_cycles,
    input  wire [63:0]     n_beats,
    input  wire [63:0]     n_starved,
    input  wire [63:0]     n_gaps,
    input  wire            irq_done,
    input  wire            irq_stopped,
    input  wire            stopped,     // ABORT and RESET have been done
    input  wire            restarted
);
    `include "e4_regs.svh"
    localparam [1:0] OKAY = 2'b00, SLVERR = 2'b10;

    reg [1:0] irq_enable, irq_status;
    assign irq = |(irq_enable & irq_status);

    wire write = awvalid && wvalid && (!bvalid || bready);
    assign awready = write;
    assign wready = write;
    wire [31:0] mask = {{8{wstrb[3]}}, {8{wstrb[2]}}, {8{wstrb[1]}}, {8{wstrb[0]}}};
    wire [31:0] value = wdata & mask;
    reg [63:0] ring_wide;
    assign ring = ring_wide[ADDR-1:0];

    always @(posedge clk) begin
        if (reset) begin
            bvalid <= 1'b0;
            bresp <= OKAY;
            abort <= 1'b0;
            restart <= 1'b0;
            irq_enable <= 2'b00;
            irq_status <= 2'b00;
            ring_wide <= 64'd0;
            ring_log2 <= 4'd0;
            tail <= 16'd0;
            timeout <= 32'd0;
            max_bursts <= 5'd8;
        end else begin
            if (bvalid && bready) bvalid <= 1'b0;
            if (stopped) abort <= 1'b0;
            if (restarted) begin
                restart <= 1'b0;
                abort <= 1'b0;
                tail <= 16'd0;
            end
            if (write) begin
                bvalid <= 1'b1;
                bresp <= OKAY;
                case ({awaddr[7:2], 2'b00})
                    R_CTRL: begin
                        if (value[0]) abort <= 1'b1;
                        if (value[1]) restart <= 1'b1;
                    end
                    R_IRQ_ENABLE: irq_enable <= value[1:0];
                    R_IRQ_STATUS: ;
                    R_RING_LO: ring_wide[31:0] <= (ring_wide[31:0] & ~mask) | value;
                    R_RING_HI: ring_wide[63:32] <= (ring_wide[63:32] & ~mask) | value;
                    R_RING_LOG2: ring_log2 <= value[3:0];
                    R_TAIL: tail <= value[15:0];
                    R_TIMEOUT: timeout <= (timeout & ~mask) | value;
                    R_MAX_BURSTS: max_bursts <= value[4:0] == 0 ? 5'd1 : value[4:0] > 5'd16 ? 5'd16 : value[4:0];
                    default: bresp <= SLVERR;
                endcase
            end
            irq_status <= (irq_status | {irq_stopped, irq_done})
                        & ~(write && {awaddr[7:2], 2'b00} == R_IRQ_STATUS ? value[1:0] : 2'b00);
        end
    end

    assign arready = !rvalid || rready;
    always @(posedge clk) begin
        if (reset) rvalid <= 1'b0;
        else if (arready) rvalid <= arvalid;
        if (arready) begin
            rresp <= OKAY;
            rdata <= 32'd0;
            case ({araddr[7:2], 2'b00})
                R_ID: rdata <= ENGINE_ID;
                R_CAPS: rdata <= CAPS | {MAP_VERSION, 27'd0};
                R_BUILD: rdata <= BUILD;
                R_CTRL: rdata <= {30'd0, restart, abort};
                R_STATUS: rdata <= status;
                R_IRQ_ENABLE: rdata <= {30'd0, irq_enable};
                R_IRQ_STATUS: rdata <= {30'd0, irq_status};
                R_RING_LO: rdata <= ring_wide[31:0];
                R_RING_HI: rdata <= ring_wide[63:32];
                R_RING_LOG2: rdata <= {28'd0, ring_log2};
                R_TAIL: rdata <= {16'd0, tail};
                R_HEAD: rdata <= {16'd0, head};
                R_TIMEOUT: rdata <= timeout;
                R_MAX_BURSTS: rdata <= {27'd0, max_bursts};
                R_ERR_ADDR_LO: rdata <= error_addr[31:0];
                R_ERR_ADDR_HI: rdata <= error_addr[63:32];
                R_TAG: rdata <= tag;
                R_CYCLES_LO: rdata <= n_cycles[31:0];
                R_CYCLES_HI: rdata <= n_cycles[63:32];
                R_BEATS_LO: rdata <= n_beats[31:0];
                R_BEATS_HI: rdata <= n_beats[63:32];
                R_STARVED_LO: rdata <= n_starved[31:0];
                R_STARVED_HI: rdata <= n_starved[63:32];
                R_GAP_LO: rdata <= n_gaps[31:0];
                R_GAP_HI: rdata <= n_gaps[63:32];
                default: rresp <= SLVERR;
            endcase
        end
    end
endmodule
