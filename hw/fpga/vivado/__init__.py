"""What Vivado needs to build the overlay. Untested: no Vivado was at hand."""
