"""Random hostile problems, until one breaks a rung; a failure ends with the command that replays it.

    python -m tests.hostile.search RUNG ARCH EXAMPLES [SEED [LONGEST]]      one rung of ladder.yaml in the emulator, T up to 70
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import seed as starting_from
from hypothesis import strategies as st

from kernels.kda import budget, hostile, inputs
from kernels.kda.cases import Case
from ladder import loader, manifest, worker
from ladder.checks import hostile as checking
from ladder.checks.context import Context, NotRun
from ladder.judge import Judge

BOUNDED = ("slow", "strong", "mixed", "0", "-1e-3", "-0.2", "-0.5", "-2.5", "-5", "uneven:-5", "ramp:-5")
UNBOUNDED = (*BOUNDED, "-8", "-27.6", "-90", "uneven:-8", "uneven:-100", "ramp:-12", "spike:-100@0")
TYPES = ("", "float32", "bfloat16", "float16")
PROBE = manifest.Cell(Case("probe", 1, 64, 1, 1, 64, 64, gpu=False), "slow", "pre")


@st.composite
def specs(draw: Any, longest: int) -> str:
    """A line of knobs; small problems first."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    H, form, safe = pick(1, 2), pick("pre", "prod"), pick("yes", "no")
    gate = pick(*(BOUNDED if safe == "yes" else UNBOUNDED))
    if form == "prod" and safe == "no":
        gate = pick("init", "0", "-1", "-20")
    dtype = pick("bfloat16", "float16")
    spec = hostile.Spec(
        B=pick(1, 2), T=draw(st.integers(1, longest)), H=H, HV=H * pick(1, 2, 3), K=pick(64, 128), V=pick(64, 128),
        dtype=dtype, gtype=pick(*TYPES), btype=pick(*TYPES), form=form, safe=safe, gate=gate,
        keys=pick("random", "same", "near", "zero", "tiny"), beta=pick("random", "0", "1"), values=pick("random", "zero", "2^8", "2^-8"),
        state=pick("none", "random", "2^8", *(["2^100"] if dtype == "bfloat16" else [])), layout=pick(*hostile.LAYOUTS))  # fmt: skip
    return str(spec)


def context(folder: Path, arch: str, kind: str, seed: int) -> Context:
    """The rung in this process, judged here as well. For kind "emulated", fla must not have been imported yet."""
    device = worker.emulate(arch) if kind == "emulated" else None
    launches = device and (lambda: [launch["kernel"] for launch in device.stats])
    judge = Judge(torch.device("cpu"))

    def ask(drawn: inputs.Inputs, outputs: Any) -> str | None:
        reference = judge.reference(drawn.case, drawn.regime, drawn.form, drawn.seed)
        return "; ".join(v.reason for v in budget.judge(*outputs, reference) if not v.passed) or None

    return Context(loader.load(folder), arch, kind, torch.device("cpu"), seed, PROBE, ask, launches)


def search(ctx: Context, number: int, examples: int, longest: int, shrink: bool = True) -> None:
    """Raises AssertionError with the failing problem's complaint and the command that replays it."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @settings(max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck))
    @starting_from(ctx.seed)
    @given(specs(longest))
    def holds(text: str) -> None:
        try:
            outcome, line = checking._case(ctx, hostile.parse(text))
        except NotRun:  # no low-precision answer to this problem is good enough to judge others by
            reject()
        assert outcome != checking.FAILED, f"{line}\nreplay: {replay(ctx, number, text)}"

    holds()


def replay(ctx: Context, number: int, text: str) -> str:
    return f'python -m ladder check {number} --hostile "{text}" --seed {ctx.seed} --device cpu --archs {ctx.arch}'


def main(number: int, arch: str, examples: int, seed: int | None = None, longest: int = 70) -> int:
    ladder = manifest.load(manifest.ROOT)
    ctx = context(ladder.folder(ladder.rung(number)), arch, "emulated", inputs.fresh_seed() if seed is None else seed)
    try:
        search(ctx, number, examples, longest, shrink=False)
    except AssertionError as error:
        print(error)
        return 1
    print(f"{examples} problems, seed {ctx.seed}: none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
