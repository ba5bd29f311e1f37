"""Device check and timing of compiled preparation kernels against fp64. Not collected by pytest.

    python gpu_prep.py MODULE.so [--regime strong] [--form prod] [--K 128] [--V 128] [--dtype bfloat16] [--check]
                       [--time CASES]

--check: worst row error per output, bitwise rerun, a few shapes (odd T, grouped heads); exit 1 where one exceeds the
rounding of the io dtype. --time: median of events around one launch after an L2 flush, case names of ladder.yaml.
"""

import argparse
import ctypes
import os
import statistics
import sys
from pathlib import Path

import torch
import yaml

if "CUTE_DSL_RUNTIME" in os.environ:
    ctypes.CDLL(os.environ["CUTE_DSL_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
import tvm_ffi  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import prep_reference as ref  # noqa: E402
from kernels.kda import inputs  # noqa: E402
from kernels.kda.budget import row_errors  # noqa: E402
from kernels.kda.cases import Case  # noqa: E402

CHECKED = [(1, 64, 1, 1), (2, 200, 2, 4), (1, 1000, 3, 3), (1, 1, 1, 2), (1, 4096, 4, 4)]


def moved(case, form):
    io, gate = 2, 2 if form == "prod" else 4
    head = case.K * (gate + 3 * io) + 2 * case.V * io + 64 * io + case.K // 16  # the last: gl, 4 bytes in 64 tokens
    return case.B * case.T * (2 * case.H * case.K * io + case.HV * head)


def check(fn, a):
    limit, bad = {"bfloat16": 1.2e-2, "float16": 1.5e-3}[a.dtype], False
    for B, T, H, HV in CHECKED:
        case = Case("check", B, T, H, HV, a.K, a.V, dtype=a.dtype)
        call = inputs.make(case, a.regime, a.form, seed=T + HV, device="cuda").call()
        out, again = ref.empty_outputs(call), ref.empty_outputs(call, 7.0)
        fn(*ref.arguments(call, out))
        fn(*ref.arguments(call, again))
        torch.cuda.synchronize()
        want = ref.reference(call)
        worst = {n: row_errors(out[n], want[n]).nan_to_num(9e9).max().item() for n in ref.OUTPUTS}
        same = all(torch.equal(out[n], again[n]) for n in ref.OUTPUTS)
        ok = same and max(worst.values()) < limit
        bad |= not ok
        print(f"  {a.regime} {a.form} B{B} T{T} H{H} HV{HV}: " + " ".join(f"{n} {e:.1e}" for n, e in worst.items())
              + f" rerun {'same' if same else 'DIFFERS'} {'ok' if ok else 'FAIL'}", flush=True)  # fmt: skip
    return bad


def measure(fn, a, flush):
    cases = yaml.safe_load((ROOT / "ladder.yaml").read_text())["cases"]
    for name in a.time.split(","):
        c = cases[name]
        case = Case(name, c["B"], c["T"], c["H"], c.get("HV", c["H"]), c["K"], c["V"])
        call = inputs.make(case, a.regime, a.form, seed=1, device="cuda").call()
        out = ref.empty_outputs(call, 0.0)
        args, times = ref.arguments(call, out), []
        for _ in range(a.rounds + 3):
            flush.zero_()
            t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            t0.record()
            fn(*args)
            t1.record()
            torch.cuda.synchronize()
            times.append(t0.elapsed_time(t1))
        times = sorted(times[3:])
        median, size = statistics.median(times), moved(case, a.form)
        print(f"  {a.regime} {a.form} {name}: {median:.4f} ms (min {times[0]:.4f}, max {times[-1]:.4f}), "
              f"{size / median / 1e9:.2f} TB/s, floor {size / 4.26e9:.4f}", flush=True)  # fmt: skip
        del call, out, args


def main():
    p = argparse.ArgumentParser()
    p.add_argument("so")
    p.add_argument("--regime", default="strong")
    p.add_argument("--form", default="prod")
    p.add_argument("--K", type=int, default=128)
    p.add_argument("--V", type=int, default=128)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--time", default="")
    p.add_argument("--check", action="store_true")
    p.add_argument("--rounds", type=int, default=15)
    a = p.parse_args()
    fn = tvm_ffi.load_module(a.so)["kda_prep"]
    print(f"{'/'.join(a.so.split('/')[-2:])}", flush=True)
    bad = a.check and check(fn, a)
    if a.time:
        measure(fn, a, torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    sys.exit(bad)


if __name__ == "__main__":
    main()
