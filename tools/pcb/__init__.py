"""Train, export and measure `pcb-defect`: a detector of flaws on a bare board, beside the picture of a good one.

`python -m tools.pcb --help`; docs/pcb.md tells how. Only training needs PyTorch.
"""
