"""fla's own chunk_kda forward, compiled by Triton for both architectures and executed here, against the recurrence
in fp64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fla_process import CASES

# a few roundings to the io type: eight units of 2^-9 (bf16) or 2^-12 (fp16), half an ulp each
BOUND = {"bfloat16": 8 * 2.0**-9, "float16": 8 * 2.0**-12}
FAST = ["plain", "safe_tail"]
SIX = ["cumsum", "intra", "inter_solve", "recompute_w_u", "fwd_kernel_h", "fwd_kernel_o"]


def run(arch, names):
    script = Path(__file__).with_name("fla_process.py")
    r = subprocess.run(
        [sys.executable, str(script), arch, *names], capture_output=True, text=True, timeout=560, cwd=script.parents[2]
    )
    assert r.returncode == 0, r.stderr[-3000:]
    rows = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")]
    assert [x["case"] for x in rows] == names
    for row in rows:
        bound = BOUND[CASES[row["case"]].get("dtype", "bfloat16")]
        assert row["o"] < bound and row["state"] < bound, row
        for part in SIX:
            assert any(part in k for k in row["kernels"]), (part, row["kernels"])
    return rows


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_forward(arch):
    rows = run(arch, FAST)
    assert rows[0]["seconds"] < 8, rows


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_forward_every_case(arch):
    run(arch, [c for c in CASES if c not in FAST])
