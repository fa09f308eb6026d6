# Build the overlay's bitstream and hand-off files for a board, with Vivado 2022.1 or newer:
#
#   python -m hw.fpga.vivado.prepare BOARD build/BOARD      (writes the wrapper and the register list this reads)
#   vivado -mode batch -source hw/fpga/vivado/build.tcl -tclargs BOARD build/BOARD
#
# BOARD is kv260 or z2. build/BOARD then has e4.bit, e4.hwh, e4.xsa and the reports of timing and use. The build stops
# where timing is not met. UNTESTED: no Vivado was at hand when this was written; its commands were run against stubs that
# check their names only. README.md beside this file says what to check on a board first.

if {[llength $argv] != 2} {
    error "usage: vivado -mode batch -source build.tcl -tclargs BOARD DIRECTORY"
}
lassign $argv board out
set here [file dirname [file normalize [info script]]]
set rtl [file join $here .. rtl]
set out [file normalize $out]

# part, board part, clock in MHz, read ports. The clocks are what the boards' PLLs give by a whole number: 1,500 MHz by 5,
# 1,000 MHz by 7. Of 150 MHz a Zynq-7000 would make 142.857 as well, and the constraint would be another.
array set boards {
    kv260 {xck26-sfvc784-2LV-c xilinx.com:kv260_som:part0:1.4 300 4}
    z2    {xc7z020clg400-1 tul.com.tw:pynq-z2:part0:1.0 142.857143 2}
}
if {![info exists boards($board)]} {
    error "no such board: $board; there are [lsort [array names boards]]"
}
lassign $boards($board) part board_part mhz n_ports
if {![file exists $out/e4_top.v] || ![file exists $out/registers.tcl]} {
    error "$out has no e4_top.v and registers.tcl: run python -m hw.fpga.vivado.prepare $board $out"
}

# The engine as an IP core, with its memory map: without one the hand-off has no registers for pynq's register_map.
proc package_engine {rtl out part} {
    create_project -force package $out/package -part $part
    add_files [glob $rtl/*.sv] $out/e4_top.v
    add_files -norecurse [glob $rtl/*.svh]
    set_property file_type {Verilog Header} [get_files *.svh]
    set_property include_dirs $rtl [current_fileset]
    set_property top e4_top [current_fileset]
    update_compile_order -fileset sources_1
    ipx::package_project -root_dir $out/ip -vendor edge-rt -library ip -taxonomy /UserIP -import_files
    set core [ipx::current_core]
    set_property name e4_top $core
    set_property version 1.0 $core
    set_property display_name {edge_rt INT4 engine} $core
    foreach old [ipx::get_memory_maps -of_objects $core] {
        ipx::remove_memory_map [get_property NAME $old] $core
    }
    set map [ipx::add_memory_map s_axi $core]
    set_property slave_memory_map_ref s_axi [ipx::get_bus_interfaces s_axi -of_objects $core]
    set block [ipx::add_address_block reg0 $map]
    set_property range 4096 $block
    set_property width 32 $block
    set_property usage register $block
    source $out/registers.tcl
    foreach entry $registers {
        lassign $entry name offset access description fields
        set register [ipx::add_register $name $block]
        set_property address_offset $offset $register
        set_property size 32 $register
        set_property access $access $register
        set_property description $description $register
        foreach field $fields {
            lassign $field field_name low width field_description
            set bits [ipx::add_field $field_name $register]
            set_property bit_offset $low $bits
            set_property bit_width $width $bits
            set_property description $field_description $bits
        }
    }
    ipx::create_xgui_files $core
    ipx::update_checksums $core
    ipx::save_core $core
    close_project
}

# Pins of the processing system: {cell, clock out, reset out, control master, {memory slaves}, interrupt in, slave clocks}.
proc add_processing_system {board mhz n_ports} {
    if {$board eq "kv260"} {
        set ps [create_bd_cell -type ip -vlnv xilinx.com:ip:zynq_ultra_ps_e ps]
        apply_bd_automation -rule xilinx.com:bd_rule:zynq_ultra_ps_e -config {apply_board_preset 1} $ps
        set settings [list CONFIG.PSU__FPGA_PL0_ENABLE 1 CONFIG.PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ $mhz \
            CONFIG.PSU__USE__M_AXI_GP0 1 CONFIG.PSU__USE__M_AXI_GP1 0 CONFIG.PSU__USE__M_AXI_GP2 0 \
            CONFIG.PSU__USE__IRQ0 1]
        set slaves {}
        set clocks {maxihpm0_fpd_aclk}
        for {set p 0} {$p < $n_ports} {incr p} {
            lappend settings CONFIG.PSU__USE__S_AXI_GP[expr {$p + 2}] 1 CONFIG.PSU__SAXIGP[expr {$p + 2}]__DATA_WIDTH 128
            lappend slaves S_AXI_HP${p}_FPD
            lappend clocks saxihp${p}_fpd_aclk
        }
        set_property -dict $settings $ps
        return [list pl_clk0 pl_resetn0 M_AXI_HPM0_FPD $slaves pl_ps_irq0 $clocks]
    }
    set ps [create_bd_cell -type ip -vlnv xilinx.com:ip:processing_system7 ps]
    apply_bd_automation -rule xilinx.com:bd_rule:processing_system7 \
        -config {make_external {FIXED_IO, DDR} apply_board_preset 1} $ps
    set settings [list CONFIG.PCW_FPGA0_PERIPHERAL_FREQMHZ $mhz CONFIG.PCW_USE_M_AXI_GP0 1 \
        CONFIG.PCW_USE_FABRIC_INTERRUPT 1 CONFIG.PCW_IRQ_F2P_INTR 1]
    set slaves {}
    set clocks {M_AXI_GP0_ACLK}
    # HP0 and HP2 first: they come to the memory controller over different ports.
    foreach p [lrange {0 2 1 3} 0 [expr {$n_ports - 1}]] {
        lappend settings CONFIG.PCW_USE_S_AXI_HP$p 1 CONFIG.PCW_S_AXI_HP${p}_DATA_WIDTH 64
        lappend slaves S_AXI_HP$p
        lappend clocks S_AXI_HP${p}_ACLK
    }
    set_property -dict $settings $ps
    return [list FCLK_CLK0 FCLK_RESET0_N M_AXI_GP0 $slaves IRQ_F2P $clocks]
}

proc draw {board mhz n_ports} {
    create_bd_design e4
    lassign [add_processing_system $board $mhz $n_ports] clock reset master slaves interrupt clocks
    create_bd_cell -type ip -vlnv edge-rt:ip:e4_top:1.0 e4
    create_bd_cell -type ip -vlnv xilinx.com:ip:proc_sys_reset resets
    create_bd_cell -type ip -vlnv xilinx.com:ip:smartconnect control
    set_property -dict {CONFIG.NUM_SI 1 CONFIG.NUM_MI 1} [get_bd_cells control]
    set clocked {e4/clk resets/slowest_sync_clk control/aclk}
    set held {control/aresetn}
    connect_bd_intf_net [get_bd_intf_pins ps/$master] [get_bd_intf_pins control/S00_AXI]
    connect_bd_intf_net [get_bd_intf_pins control/M00_AXI] [get_bd_intf_pins e4/s_axi]
    set p 0
    foreach slave $slaves {
        # A SmartConnect of one to one: it turns AXI4 into the AXI3 of Zynq-7000, and adds the user signals of UltraScale+.
        set path memory$p
        create_bd_cell -type ip -vlnv xilinx.com:ip:smartconnect $path
        set_property -dict {CONFIG.NUM_SI 1 CONFIG.NUM_MI 1} [get_bd_cells $path]
        connect_bd_intf_net [get_bd_intf_pins e4/m[format %02d $p]_axi] [get_bd_intf_pins $path/S00_AXI]
        connect_bd_intf_net [get_bd_intf_pins $path/M00_AXI] [get_bd_intf_pins ps/$slave]
        lappend clocked $path/aclk
        lappend held $path/aresetn
        incr p
    }
    foreach pin $clocks {
        lappend clocked ps/$pin
    }
    foreach pin $clocked {
        connect_bd_net [get_bd_pins ps/$clock] [get_bd_pins $pin]
    }
    connect_bd_net [get_bd_pins ps/$reset] [get_bd_pins resets/ext_reset_in]
    foreach pin $held {
        connect_bd_net [get_bd_pins resets/interconnect_aresetn] [get_bd_pins $pin]
    }
    connect_bd_net [get_bd_pins resets/peripheral_aresetn] [get_bd_pins e4/resetn]
    connect_bd_net [get_bd_pins e4/irq] [get_bd_pins ps/$interrupt]
    assign_bd_address
    regenerate_bd_layout
    validate_bd_design
    save_bd_design
}

package_engine $rtl $out $part
create_project -force e4 $out/project -part $part
set_property board_part $board_part [current_project]
set_property ip_repo_paths $out/ip [current_project]
update_ip_catalog
draw $board $mhz $n_ports
set design [get_files e4.bd]
generate_target all $design
add_files -norecurse [make_wrapper -files $design -top]
set_property top e4_wrapper [current_fileset]
launch_runs impl_1 -to_step write_bitstream -jobs 4
wait_on_run impl_1
if {[get_property PROGRESS [get_runs impl_1]] ne "100%"} {
    error "implementation has not ended: see $out/project/e4.runs"
}
open_run impl_1
report_timing_summary -file $out/timing.txt
report_utilization -hierarchical -file $out/utilisation.txt
set slack [get_property SLACK [get_timing_paths -max_paths 1 -nworst 1 -setup]]
if {$slack < 0} {
    error "timing is not met at $mhz MHz: worst slack $slack ns, see $out/timing.txt"
}
file copy -force [glob $out/project/e4.runs/impl_1/*.bit] $out/e4.bit
file copy -force [glob $out/project/e4.gen/sources_1/bd/e4/hw_handoff/*.hwh] $out/e4.hwh
write_hw_platform -fixed -include_bit -force $out/e4.xsa
puts "wrote $out/e4.bit, e4.hwh and e4.xsa; worst slack $slack ns at $mhz MHz"
