"""Device check and timing of the whole rung, and of fla's stages that its prep replaces. Not collected by pytest.

    python gpu_rung.py [--rung 005-fused-prep] [--regimes strong,slow] [--cases h96,...] [--fla CASE]
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from kernels.kda import budget, inputs, oracle  # noqa: E402
from kernels.kda.cases import Case  # noqa: E402
from kernels.kda.contract import bind  # noqa: E402
from ladder import loader  # noqa: E402

TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def problem_of(call):
    tensors = {n: call.get(n) for n in TENSORS}
    flags = {"l2norm": "use_qk_l2norm_in_kernel", "use_gate": "use_gate_in_kernel",
             "beta_sigmoid": "use_beta_sigmoid_in_kernel"}  # fmt: skip
    flags = {name: call.get(word, False) for name, word in flags.items()}
    return tensors, bind(tensors, scale=None, output_final_state=True, safe_gate=call["safe_gate"],
                         lower_bound=call.get("lower_bound"), **flags)  # fmt: skip


def timed(fn, flush, rounds=11):
    times = []
    for _ in range(rounds + 3):
        flush.zero_()
        t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        t0.record()
        fn()
        t1.record()
        torch.cuda.synchronize()
        times.append(t0.elapsed_time(t1))
    return statistics.median(times[3:])


def stages_ms(rung, call, flush):
    tensors, problem = problem_of(call)
    x, out = dict(tensors), {}
    for stage in rung.stages:
        out[stage.name] = timed(lambda s=stage: s.run(problem, x), flush)
        x.update(stage.run(problem, x))
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rung", default="005-fused-prep")
    p.add_argument("--regimes", default="strong")
    p.add_argument("--cases", default="")
    p.add_argument("--check", default="")
    a = p.parse_args()
    rung = loader.load(ROOT / "ideas" / a.rung)
    cases = yaml.safe_load((ROOT / "ladder.yaml").read_text())["cases"]
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for regime in a.regimes.split(","):
        for form in [f for f in a.check.split(",") if f]:
            call = inputs.make(Case("check", 1, 1000, 2, 4, 128, 128), regime, form, seed=5, device="cuda").call()
            ref = budget.reference(oracle.chunked(**call), **call)
            for v in budget.judge(*rung.chunk_kda(**call), ref):
                said = "ok" if v.passed else v.reason
                print(f"  {regime} {form} {v.tensor}: error {v.error:.2e} budget {v.budget:.2e} {said}", flush=True)
        for name in [c for c in a.cases.split(",") if c]:
            c = cases[name]
            case = Case(name, c["B"], c["T"], c["H"], c.get("HV", c["H"]), c["K"], c["V"])
            call = inputs.make(case, regime, "prod", 1, "cuda").call()
            whole = timed(lambda: rung.chunk_kda(**call), flush)
            parts = stages_ms(rung, call, flush)
            stages = ", ".join(f"{n} {t:.4f}" for n, t in parts.items())
            print(f"  {a.rung} {regime} {name}: {whole:.4f} ms; {stages}", flush=True)
            del call


if __name__ == "__main__":
    main()
