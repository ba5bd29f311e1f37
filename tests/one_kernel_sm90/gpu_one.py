"""Device check and timing of a one-kernel rung (006 on), compiled elsewhere. Not collected by pytest.

    python gpu_one.py build FOLDER                      # where the CuTe DSL is: FOLDER/<form>-<gate>-v<tile>/unit.so
    python gpu_one.py run FOLDER [--check] [--time CASES] [--tiles 128,64] [--regimes ...] [--forms ...] [--rounds 15]

--check: verdicts against the error budget at T = 1,000 with grouped heads, and a bitwise rerun; exit 1 where one fails.
--time: case names of ladder.yaml; graph replay, L2 flushed, median; with microseconds per chunk of the busiest SM.
--tiles: v_tile variants to check and time (64: a CTA for each 64 columns of V, which prepare the chunks twice).
"""

import argparse
import ctypes
import os
import shutil
import statistics
import sys
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from kernels.kda import budget, inputs, oracle  # noqa: E402
from kernels.kda.cases import Case  # noqa: E402
from kernels.kda.contract import CHUNK  # noqa: E402

GATES = {("prod", True): "safe", ("prod", False): "softplus", ("pre", True): "log", ("pre", False): "log"}
SMS = 132


def name_of(form, bounded, tile):
    return f"{form}-{GATES[form, bounded]}-{'bounded' if bounded else 'any'}-v{tile}"


def build(folder: Path, slug: str):
    from _common.cute import compile_unit
    from ladder import loader

    rung = loader.load(ROOT / "ideas" / slug).module
    for (form, bounded), gate in GATES.items():
        for tile in (128, 64):
            params = rung.unit_params(128, 128, "bfloat16", gate, bounded, form == "prod", False) | {"v_tile": tile}
            artifact = compile_unit(rung.unit("sm_90a", **params))
            target = folder / name_of(form, bounded, tile)
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(artifact.so, target / "unit.so")
            print(target / "unit.so", flush=True)


def arguments(call):
    B, T, _, K = call["q"].shape
    HV, V = call["v"].shape[2:]
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    o, state = torch.full_like(call["v"], 7.0), torch.full((B, HV, K, V), 7.0, device="cuda")
    return (*(call.get(n) for n in names), o, state, K**-0.5, call.get("lower_bound") or 0.0), o, state


def check(fn, regime, form, label):
    call = inputs.make(Case("check", 1, 1000, 2, 4, 128, 128), regime, form, seed=5, device="cuda").call()
    (args, o, state), (again, o2, state2) = arguments(call), arguments(call)
    fn(*args)
    fn(*again)
    torch.cuda.synchronize()
    same = torch.equal(o, o2) and torch.equal(state, state2)
    verdicts = budget.judge(o, state, budget.reference(oracle.chunked(**call), **call))
    said = "; ".join(f"{v.tensor} {v.error:.2e} of {v.budget:.2e} {v.reason}" for v in verdicts)
    ok = same and all(v.passed for v in verdicts)
    rerun = f"rerun {'same' if same else 'DIFFERS'}, {'ok' if ok else 'FAIL'}"
    print(f"  {label} {regime} {form}: {said}; {rerun}", flush=True)
    return ok


def measure(fn, case, regime, form, label, flush, rounds):
    call = inputs.make(case, regime, form, seed=1, device="cuda").call()
    args, _, _ = arguments(call)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn(*args)
    times = []
    for _ in range(rounds + 3):
        flush.zero_()
        t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        t0.record()
        graph.replay()
        t1.record()
        torch.cuda.synchronize()
        times.append(t0.elapsed_time(t1))
    times = sorted(times[3:])
    median, ctas = statistics.median(times), case.B * case.HV * (128 // int(label.rsplit("v", 1)[1]))
    chunks = -(-ctas // SMS) * -(-case.T // CHUNK)
    gate = 2 if form == "prod" else 4
    floor = case.B * case.T * (2 * case.H * 256 + case.HV * (128 * gate + 512)) / 4.26e9
    print(f"  {label} {regime} {form} {case.name}: {median:.4f} ms (min {times[0]:.4f}, max {times[-1]:.4f}), "
          f"{1e3 * median / chunks:.2f} us a chunk, floor {floor:.4f}", flush=True)  # fmt: skip


def run(a):
    import tvm_ffi

    cases, flush = yaml.safe_load((ROOT / "ladder.yaml").read_text())["cases"], None
    if a.time:
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    ok, kept = True, []
    for tile in a.tiles.split(","):
        for regime in a.regimes.split(","):
            for form in a.forms.split(","):
                label = name_of(form, regime != "init", tile)
                kept.append(tvm_ffi.load_module(str(a.folder / label / "unit.so")))
                fn = kept[-1]["kda_forward"]
                ok &= not a.check or check(fn, regime, form, label)
                for name in [c for c in a.time.split(",") if c]:
                    c = cases[name]
                    case = Case(name, c["B"], c["T"], c["H"], c.get("HV", c["H"]), c["K"], c["V"])
                    measure(fn, case, regime, form, label, flush, a.rounds)
    return ok


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("build", "run"))
    p.add_argument("folder", type=Path)
    p.add_argument("--rung", default="006-one-kernel", help="folder under ideas/, for build")
    p.add_argument("--check", action="store_true")
    p.add_argument("--time", default="")
    p.add_argument("--tiles", default="128")
    p.add_argument("--regimes", default="strong,slow,mixed,init")
    p.add_argument("--forms", default="prod")
    p.add_argument("--rounds", type=int, default=15)
    a = p.parse_args()
    if a.what == "build":
        return build(a.folder, a.rung)
    if "CUTE_DSL_RUNTIME" in os.environ:
        ctypes.CDLL(os.environ["CUTE_DSL_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
    sys.exit(not run(a))


if __name__ == "__main__":
    main()
