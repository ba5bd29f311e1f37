"""Hostile inputs: each is answered within the budget, or refused before any launch, whatever the rung's arithmetic.

A rung that keeps one of fla's stages inherits what that stage does; such a case is counted as inherited only if the
stage is known for it (UPSTREAM), the rung still launches the stage's kernels, and fla's own chunk_kda, run on the same
inputs, goes wrong too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.kda import hostile
from kernels.kda.contract import CHUNK, ContractError, Unsupported
from kernels.kda.hostile import Spec
from kernels.kda.oracle import PER_TOKEN
from ladder.cells import problem_of, seed_for
from ladder.checks.context import Context, Failure, NotRun, first_difference
from ladder.judge import starved

PASSED, REFUSED, INHERITED, FAILED = KINDS = ("passed", "refused", "inherited", "failed")
SHOWN = 4  # failures told in full
CUTS = (1, 16, 63, 64, 65, 127, 130)
FLA = {"gate": ("cumsum",), "intra": ("chunk_kda_fwd_kernel_i",)}  # stage -> its kernels in fla
# What is known to go wrong in fla 0.6, and in which stage: found by these very cases, shown by running fla each time.
UPSTREAM: tuple[tuple[Callable[[Spec], bool], str], ...] = (
    (lambda s: s.gate.startswith("inf@") and s.form == "pre", "gate"),  # differences of a cumulated -inf are NaN
    (lambda s: s.K == 1, "intra"),  # Triton 3.6 cannot compile it (3.9 can)
    # Its products are TF32, and a tensor core truncates to it: with identical keys the errors have one sign.
    (lambda s: s.keys == "same", "intra"),
)

Tally = dict[str, list[str]]


def run(ctx: Context, family: str, specs: tuple[str, ...] = ()) -> Tally:
    """Outcome -> lines, one per case. Raises Failure (with the tally as its `cases`) where any case failed."""
    core, more = hostile.FAMILIES.get(family, ((), ()))
    tally: Tally = {kind: [] for kind in KINDS}
    for text in specs or (core if ctx.slow else core + more):
        spec = hostile.parse(text)
        kind, line = _case(ctx, spec)
        tally[kind].append(f"{spec}{': ' if line else ''}{line}")
    if tally[FAILED]:
        raise Failure(told(tally), cases=tally)
    return tally


def told(tally: Tally) -> str:
    """The tally in words: the failures themselves, else how many cases went which way and what was inherited."""
    if tally[FAILED]:
        many = len(tally[FAILED])
        shown = "; ".join(f"`{line[:300]}`" for line in tally[FAILED][:SHOWN])
        return f"{many} of {sum(map(len, tally.values()))} hostile cases fail: {shown}{'; ...' if many > SHOWN else ''}"
    counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in tally.items() if lines)
    return "; ".join([counts, *(f"inherited `{line}`" for line in tally[INHERITED])])


def _case(ctx: Context, spec: Spec) -> tuple[str, str]:
    inputs = hostile.make(str(spec), seed_for(ctx.seed, str(spec)), ctx.device)
    launched = len(ctx.launches()) if ctx.launches else 0
    try:
        if spec.nan != "none":
            _contained(ctx, spec, inputs)
        else:
            ctx.judged(inputs, ctx.call(inputs))
            if spec.cut == "all":
                _split(ctx, spec, inputs)
    except (ContractError, Unsupported) as refusal:
        return _refused(ctx, inputs, refusal, launched)
    except Failure as failure:
        return _inherited(ctx, spec, inputs, str(failure))
    except NotRun:
        raise  # a void case judges nobody
    except Exception as error:
        if starved(error):
            raise
        ctx.synchronize()  # raises in turn where the device is lost
        return _inherited(ctx, spec, inputs, _raised(error))
    return PASSED, ""


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _refused(ctx: Context, inputs: Any, refusal: Exception, launched: int) -> tuple[str, str]:
    line = str(refusal)
    if ctx.launches and len(ctx.launches()) != launched:
        return FAILED, f"refused only after kernels were launched: {line}"
    if "\n" in line or not line:
        return FAILED, f"refused in {len(line.splitlines())} lines, accepted: one"
    try:
        declined = ctx.rung.unsupported(problem_of(inputs))
    except ContractError:
        declined = line
    return (REFUSED, line) if declined else (FAILED, f"refused by its values (its shapes are accepted): {line}")


def _inherited(ctx: Context, spec: Spec, inputs: Any, complaint: str) -> tuple[str, str]:
    """Whether fla itself goes wrong on these inputs, in a stage that the rung has from it."""
    ours = set(ctx.rung.kernels)
    stages = [stage for known, stage in UPSTREAM if known(spec) and any(k.startswith(FLA[stage]) for k in ours)]
    if not stages:
        return FAILED, complaint
    from fla.ops.kda import chunk_kda

    try:
        with torch.no_grad():
            upstream = ctx.ask_judge(inputs, chunk_kda(**inputs.call()))
    except Exception as error:
        if starved(error):
            raise
        upstream = _raised(error)
    if not upstream:
        return FAILED, f"{complaint} (fla's own chunk_kda is right)"
    return INHERITED, f"fla's {stages[0]} stage; fla's chunk_kda: {upstream}"


def _contained(ctx: Context, spec: Spec, inputs: Any) -> None:
    """NaN in one token shows in that token's row, and in no earlier chunk, other head or other batch."""
    clean = hostile.make(str(replace(spec, nan="none")), inputs.seed, ctx.device)
    o, state = ctx.call(clean)
    bad, bad_state = ctx.call(inputs)
    token = int(spec.nan.partition("@")[2])
    shared = spec.case.HV // spec.H if spec.nan[0] in "qk" else 1  # value heads that read the poisoned one
    if not torch.isnan(bad[0, token, :shared]).any(-1).all():
        raise Failure(f"NaN in a token's {spec.nan.partition('@')[0]} does not show in its row of o")
    start = token // CHUNK * CHUNK
    for where, now, before in (
        ("an earlier chunk", bad[:, :start], o[:, :start]), ("another head", bad[:, :, shared:], o[:, :, shared:]),
        ("another batch", bad[1:], o[1:]), ("another head's state", bad_state[:, shared:], state[:, shared:]),
        ("another batch's state", bad_state[1:], state[1:])):  # fmt: skip
        if now.numel() and (difference := first_difference(now, before)):
            raise Failure(f"NaN in one token reaches {where}: {difference}")


def _split(ctx: Context, spec: Spec, inputs: Any) -> None:
    """Two parts with the state handed over answer like one, wherever the cut."""
    for cut in CUTS[2:3] if ctx.slow else CUTS:
        if cut < spec.T:
            first, state = ctx.call(part(inputs, slice(0, cut)))
            second, state = ctx.call(part(inputs, slice(cut, spec.T), state))
            ctx.judged(inputs, (torch.cat([first, second], dim=1), state), f"cut at token {cut}")


def part(inputs: Any, tokens: slice, state: torch.Tensor | None = None) -> Any:
    """The inputs of these tokens, with this initial state in place of their own."""
    tensors = {name: t[:, tokens] if name in PER_TOKEN else t for name, t in inputs.tensors.items()}
    if state is not None:
        tensors["initial_state"] = state
    return replace(inputs, tensors=tensors)
