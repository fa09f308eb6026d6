from __future__ import annotations

import subprocess
import sys


def test_a_plan_without_onnx_names_what_to_install() -> None:
    code = "import sys; sys.modules['onnx'] = None; from edge_rt.cli import main; main(['fpga', 'plan', 'x.onnx'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("onnx is not installed; install it with `pip install 'edge_rt[onnx]'`\n")
    assert "Traceback" not in done.stderr
