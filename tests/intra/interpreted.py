"""Runs rung 004's intra kernel and the zero fills in Triton's interpreter; prints one JSON object per case.

A process of its own, because the interpreter must be chosen before triton is imported. Its `dot` multiplies bf16 bit
patterns as integers, so it is replaced by one that widens its operands; its cast to bf16 truncates, which doubles bf16 errors.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ideas/004-prezeroed-aqk"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402


def widen(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def create_dot(self, a, b, d, precision, imprecise):
    return interpreter.TensorHandle(np.matmul(widen(a), widen(b)) + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = create_dot

import intra  # noqa: E402
import intra_fla  # noqa: E402
from stage import C, arguments, reference, row_error  # noqa: E402

CASES = {
    "strong": ((1, 100, 1, 2, 64, 64), "bfloat16", "strong", False),
    "bounded": ((1, 100, 1, 2, 64, 64), "bfloat16", "strong", True),
    "slow": ((2, 64, 1, 1, 64, 128), "float16", "slow", False),
    "deep": ((1, 77, 1, 1, 128, 64), "float16", "deep", False),
    "equal": ((1, 64, 1, 1, 64, 64), "float16", "equal", False),
    "one_token": ((1, 65, 1, 1, 64, 64), "float16", "strong", False),
    "fp16_ignores_bounded": ((1, 64, 1, 1, 64, 64), "float16", "strong", True),
}


def poisoned(*shape, dtype=None, device=None):
    return torch.full(shape, float("nan"), dtype=dtype)


def run(args, bounded):
    torch.empty, kept = poisoned, torch.empty      # every entry must be written
    try:
        return intra.intra_fused(*args, bounded=bounded)
    finally:
        torch.empty = kept


def case(shape, io, regime, bounded):
    T = shape[1]
    args = arguments(*shape, getattr(torch, io), regime)
    out, exact = run(args, bounded), reference(*args)
    above = torch.arange(C) > (torch.arange(T) % C)[:, None]
    future = T - 9                                 # tokens from here on are drawn anew, decays included
    changed = [x.clone() if torch.is_tensor(x) else x for x in args]
    other = arguments(*shape, getattr(torch, io), "strong", seed=1)
    for i in (0, 1, 2, 4):
        changed[i][:, future:] = other[i][:, future:]
    if future % C:
        changed[3][:, future:] = args[3][:, future - 1:future] + (other[3][:, -9:] - other[3][:, -10:-9]).clamp(max=0)
    later = run(changed, bounded)
    return {
        "errors": {name: row_error(out[name], exact[name]) for name in exact},
        "zeros": bool((out["Aqk"].transpose(1, 2)[:, :, above] == 0).all()),
        "past_bits": all(torch.equal(out[n][:, :future], later[n][:, :future]) for n in ("Aqk", "w", "u", "qg")),
    }


def zero_upper(folder):
    import importlib.util

    spec = importlib.util.spec_from_file_location("zero_upper_" + folder[:3], ROOT / "ideas" / folder / "zero_upper.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    T = 70
    Aqk = torch.full((2, T, 3, C), 2.0, dtype=torch.float16)
    above = (torch.arange(C) > (torch.arange(T) % C)[:, None])[None, :, None].expand(2, T, 3, C)
    Aqk[above] = float("nan")
    module.zero_upper_(Aqk)
    return {"above": bool((Aqk[above] == 0).all()), "rest": bool((Aqk[~above] == 2).all())}


def zero_pair():
    a, b = (torch.full((5, 64), float("nan"), dtype=torch.float16) for _ in range(2))
    intra_fla.kda_zero_pair[(1,)](a, b, 4, ROWS=8)
    return {"inside": bool((a[:4] == 0).all() and (b[:4] == 0).all()), "outside": bool(a[4:].isnan().all())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, parameters in CASES.items():
        print(json.dumps({"case": name, **case(*parameters)}), flush=True)
    for folder in ("002-cute-fused", "003-cute-pipeline"):
        print(json.dumps({"case": folder, **zero_upper(folder)}), flush=True)
    print(json.dumps({"case": "zero_pair", **zero_pair()}), flush=True)
