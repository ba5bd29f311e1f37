"""Rung 007 on a GPU, beside 005: checked, then timed, in one call. Not collected by pytest.

    python gpu_segments.py --pack out/segments            # where the CuTe DSL is: compiles what the call below loads
    python gpu_segments.py --units out/segments           # on a GPU, with the packages of `ladder bundle` at hand

Prints, per case and regime: the rungs as CUDA graphs in turn, 007's stages alone, and its state stage alone for other
numbers of segments and both V tiles. Before that: the error budget in every regime and form, reruns and (slow, mixed)
the bits of a single segment. Exit 1 where a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
from _common import cute, target  # noqa: E402
from _common.cache import CallCache  # noqa: E402
from kernels.kda import budget, inputs, oracle  # noqa: E402
from kernels.kda.cases import Case  # noqa: E402
from kernels.kda.contract import bind  # noqa: E402
from ladder import loader  # noqa: E402

PARENT, RUNG = "005-fused-prep", "007-segments"
SEGMENTS = {"t2048_h12": (1, 2, 3, 5, 11), "t8192_h24": (1, 2, 5), "t32768_h32": (1, 2, 4)}
ARCH = "sm_90a"


def state_units(module):
    """Every variant of the state kernel that is timed, by (segmented, v_tile)."""
    return {
        (segmented, v_tile): module.state_unit(
            ARCH, K=128, V=128, dtype="bfloat16", segmented=segmented, has_h0=False, v_tile=v_tile
        )
        for segmented in (False, True) for v_tile in (64, 128)
    }  # fmt: skip


def pack(folder: Path) -> None:
    """Compile the units of K = V = 128, bf16, and copy them to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = list(state_units(loader.load(ROOT / "ideas" / RUNG).module).values())
    for name in (PARENT, RUNG):
        for template in loader.load(ROOT / "ideas" / name).units:
            unit = template(ARCH)
            p = dict(unit.params)
            if (p["K"], p["V"], p["dtype"]) == (128, 128, "bfloat16"):
                wanted.append(unit)
    for unit in wanted:
        print(unit, flush=True)
        artifact = cute.compile_unit(unit).folder
        shutil.copytree(artifact, folder / artifact.name)
    (folder / "toolchain.json").write_text(json.dumps(cute.toolchain()))


def unpack(folder: Path) -> None:
    """Load units from `folder`; the DSL's runtime from where CUTE_DSL_RUNTIME says, if it does."""
    cute.BUILD = folder.resolve()
    runtime = cute.BUILD / cute.RUNTIME
    if "CUTE_DSL_RUNTIME" in os.environ and not runtime.exists():
        runtime.symlink_to(os.environ["CUTE_DSL_RUNTIME"])


def problem_of(call):
    tensors = {n: call.get(n) for n in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")}
    flags = {"l2norm": "use_qk_l2norm_in_kernel", "use_gate": "use_gate_in_kernel",
             "beta_sigmoid": "use_beta_sigmoid_in_kernel"}  # fmt: skip
    flags = {name: call.get(word, False) for name, word in flags.items()}
    return tensors, bind(tensors, scale=None, output_final_state=True, safe_gate=call["safe_gate"],
                         lower_bound=call.get("lower_bound"), **flags)  # fmt: skip


def check(rung) -> bool:
    good = True
    for regime in inputs.REGIMES:
        for form in inputs.FORMS:
            for state in (False, True):
                case = Case("check", 1, 1000, 2, 4, 128, 128, initial_state=state)
                call = inputs.make(case, regime, form, seed=5, device="cuda").call()
                first, again = rung.chunk_kda(**call), rung.chunk_kda(**call)
                same = all(torch.equal(a, b) for a, b in zip(first, again))
                if regime in ("slow", "mixed"):
                    same &= all(torch.equal(a, b) for a, b in zip(first, one_segment(rung, call)))
                verdicts = budget.judge(*first, budget.reference(oracle.chunked(**call), **call))
                good &= same and all(v.passed for v in verdicts)
                said = ", ".join(f"{v.tensor} {v.error:.2e} of {v.budget:.2e} {v.reason or 'ok'}" for v in verdicts)
                print(f"check {regime} {form}{' h0' if state else ''}: {said}; "
                      f"bits {'same' if same else 'DIFFER'}", flush=True)  # fmt: skip
    return good


@contextlib.contextmanager
def altered(module, name, value):
    """The rung's module with another `name`, and no plan made without it."""
    kept = getattr(module, name), module.CALLS
    setattr(module, name, value)
    module.CALLS = CallCache()
    try:
        yield
    finally:
        setattr(module, name, kept[0])
        module.CALLS = kept[1]


def one_segment(rung, call):
    with altered(rung.module, "multiprocessors", lambda device: 1):
        return rung.chunk_kda(**call)


class Clock:
    """Device time of a call between two events, after the L2 was flushed."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def ms(self, fn) -> float:
        self.flush.zero_()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        fn()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after)

    def median(self, fn, rounds: int) -> float:
        return statistics.median([self.ms(fn) for _ in range(rounds + 3)][3:])


def captured(fn):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def compare(rungs, call, clock, rounds) -> str:
    """The rungs' graphs in turn, so that both see the same clocks."""
    replays = {name: captured(lambda r=r: r.chunk_kda(**call)) for name, r in rungs.items()}
    times = {name: [] for name in replays}
    for _ in range(rounds + 3):
        for name, replay in replays.items():
            times[name].append(clock.ms(replay))
    return ", ".join(f"{name} {statistics.median(t[3:]):.4f} (min {min(t[3:]):.4f})" for name, t in times.items())


def stages(rung, x, problem, clock, rounds):
    out = []
    for stage in rung.stages:
        out.append(f"{stage.name} {clock.median(lambda: stage.run(problem, x), rounds):.4f}")  # noqa: B023
        x.update(stage.run(problem, x))
    return ", ".join(out)


def variants(rung, x, problem, segments, clock, rounds) -> str:
    """The state kernel alone: segments / V tile."""
    operands = [x[n] for n in ("qg", "w", "kg", "u", "Aqk", "gl")]
    o, ht, out = torch.empty_like(x["o"]), torch.empty_like(x["final_state"]), []
    for (segmented, v_tile), unit in state_units(rung.module).items():
        fn = target.current().load(unit)
        for n in segments:
            if segmented != (n > 1):
                continue
            fade = x["fade"] if segmented else None
            length = -(-problem.NT // n)
            ms = clock.median(lambda: fn(*operands, fade, None, o, ht, problem.scale, length), rounds)  # noqa: B023
            out.append(f"{n}/{v_tile} {ms:.4f}")
    return ", ".join(out)


def with_fade(rung, tensors, problem):
    """What prep leaves, with the fade even where the plan has one segment."""
    with altered(rung.module, "segment_length", lambda p: 1):
        return {**tensors, **rung.stages[0].run(problem, tensors)}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--pack", type=Path)
    p.add_argument("--units", type=Path)
    p.add_argument("--cases", default="t2048_h12,t8192_h24,t32768_h32")
    p.add_argument("--regimes", default=",".join(inputs.REGIMES))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--no-check", action="store_true")
    a = p.parse_args()
    if a.pack:
        return pack(a.pack)
    if a.units:
        unpack(a.units)
    rungs = {name: loader.load(ROOT / "ideas" / name) for name in (PARENT, RUNG)}
    rung = rungs[RUNG]
    good = a.no_check or check(rung)
    cases, clock = yaml.safe_load((ROOT / "ladder.yaml").read_text())["cases"], Clock()
    for name in a.cases.split(","):
        c = cases[name]
        case = Case(name, c["B"], c["T"], c["H"], c.get("HV", c["H"]), c["K"], c["V"])
        for regime in a.regimes.split(","):
            call = inputs.make(case, regime, "prod", 1, "cuda").call()
            tensors, problem = problem_of(call)
            length = rung.module.segment_length(problem)
            print(f"{name} {regime}, segments of {length} of {problem.NT} chunks, ms", flush=True)
            print(f"  graphs: {compare(rungs, call, clock, a.rounds)}", flush=True)
            print(f"  stages: {stages(rung, dict(tensors), problem, clock, a.rounds)}", flush=True)
            x = with_fade(rung, tensors, problem)
            final_state = torch.empty(problem.B, problem.HV, problem.K, problem.V, device="cuda")
            x.update(o=torch.empty_like(x["u"]), final_state=final_state)
            alone = variants(rung, x, problem, SEGMENTS.get(name, (1,)), clock, a.rounds)
            print(f"  state, segments/V tile: {alone}", flush=True)
            del call, tensors, x
    sys.exit(not good)


if __name__ == "__main__":
    main()
