"""Rung 004's intra stage against its fp64 definition, in Triton's interpreter; resources of the compiled kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from _common.resources import resources

HERE = Path(__file__).parent
LIMIT = {"bfloat16": 5e-2, "float16": 4e-3}      # largest row error; the interpreter truncates to bf16
DTYPE = {"strong": "bfloat16", "bounded": "bfloat16"}
CASES = ("strong", "bounded", "slow", "deep", "equal", "one_token", "fp16_ignores_bounded")


@pytest.fixture(scope="module")
def results():
    process = subprocess.run([sys.executable, "-W", "ignore", HERE / "interpreted.py"], capture_output=True, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_matches_definition(results, case):
    errors = results[case]["errors"]
    limit = LIMIT[DTYPE.get(case, "float16")]
    assert set(errors) == {"Aqk", "w", "u", "qg", "kg"}
    assert all(error < limit for error in errors.values()), errors     # nan fails


@pytest.mark.parametrize("case", CASES)
def test_zeros_and_past(results, case):
    assert results[case]["zeros"], "Aqk above the diagonal is not exactly zero"
    assert results[case]["past_bits"], "a row changed with tokens after it"


@pytest.mark.parametrize("rung", ("002-cute-fused", "003-cute-pipeline"))
def test_zero_upper(results, rung):
    assert results[rung] == {"above": True, "rest": True}


def test_zero_pair(results):
    assert results["zero_pair"] == {"inside": True, "outside": True}


@pytest.mark.slow
@pytest.mark.parametrize("arch", (90, 100))
@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("K, V", ((128, 128), (64, 64), (128, 256)))
def test_compiles(arch, bounded, K, V):
    """Nothing spilled; at K = V = 128 on Hopper three CTAs an SM, which need at most 168 registers and 75 KB of shared memory;
    no memory access element by element."""
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = HERE.parents[1] / "ideas/004-prezeroed-aqk/intra.py"
    spec = importlib.util.spec_from_file_location("rung004_intra", path)
    intra = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(intra)
    fn = intra.kda_intra_fused
    config = intra.config(K, V, bounded, f"sm_{arch}a")
    constants = {"K": K, "V": V, "BOUNDED": bounded, **{n: config[n] for n in ("BK", "BKD", "BV")}}
    types = dict(g="*fp32", beta="*fp32", scale="fp32", T="i32", NT="i32", H="i32", HV="i32")
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in fn.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(fn.arg_names) if signature[n].startswith("*")}
    options = {n: config[n] for n in ("num_warps", "num_stages", "maxnreg") if n in config}
    source = ASTSource(fn, signature, constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    (used,) = resources(kernel.asm["cubin"])
    assert used.spilled == 0, used
    assert kernel.metadata.shared <= 75 * 1024
    assert used.registers <= 168 or (arch, K, V) != (90, 128, 128)
    assert "st.global.b16" not in kernel.asm["ptx"], "a store fell apart into single elements"
    assert "ld.global.b16" not in kernel.asm["ptx"], "a load fell apart into single elements"
