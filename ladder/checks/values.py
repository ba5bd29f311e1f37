"""Properties of what a rung computes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ladder.checks.context import Context, Failure, NotRun, first_difference, same
from ladder.manifest import Cell

PER_TOKEN = ("q", "k", "v", "g", "beta")


def oracle(ctx: Context, cell: Cell) -> None:
    """Every row of o and of the final state is within the error budget of the fp64 oracle, in poisoned memory."""
    inputs = ctx.draw("oracle", cell=cell)
    ctx.supported(inputs)
    with ctx.poisoned(inputs):
        outputs = tuple(None if x is None else x.cpu() for x in ctx.call(inputs))
    inputs = replace(inputs, tensors={})  # with the outputs on the host, all of the device's memory is the judge's
    ctx.judged(inputs, outputs)


def every_row_written(ctx: Context) -> None:
    """With outputs and allocator full of NaN beforehand, no NaN is left in what the rung returns."""
    inputs = ctx.draw("poison")
    ctx.supported(inputs)
    with ctx.poisoned(inputs):
        outputs = ctx.call(inputs)
    for name, x in zip(("o", "final_state"), outputs):
        if x is None:
            continue
        rows = torch.isnan(x).any(-1)
        if rows.any():
            first = tuple(int(i) for i in rows.nonzero()[0])
            axes = "(batch, token, head)" if name == "o" else "(batch, head, k)"
            raise Failure(f"{name}: {int(rows.sum())} of {rows.numel()} rows still hold the poison (never written, or "
                          f"computed from memory that nobody wrote), first at {axes} = {first}")  # fmt: skip


def causality(ctx: Context) -> None:
    """Outputs before a token are bitwise unchanged when only that token and later ones change."""
    inputs, (o, _) = ctx.base()
    other = ctx.draw("future")
    T = inputs.case.T
    cuts = {T // 2 + 5} if ctx.slow else {1, 16, T // 2, T // 2 + 5, T - 1}
    for cut in sorted(c for c in cuts if 0 < c < T):
        changed = inputs.clone()
        for name in PER_TOKEN:
            changed.tensors[name][:, cut:] = other.tensors[name][:, cut:]
        now, _ = ctx.call(changed)
        if difference := first_difference(now[:, :cut], o[:, :cut]):
            raise Failure(f"reads future tokens: changing only tokens {cut} onward changes o before token {cut}: {difference}")


def two_halves(ctx: Context) -> None:
    """One long sequence equals two halves joined by the state, within the budget."""
    inputs = ctx.base()[0]
    T = inputs.case.T
    cut = T // 2 // 64 * 64
    if not cut:
        raise NotRun(f"the probe's {T} tokens are fewer than two chunks")

    def part(tokens: slice, length: int, state: torch.Tensor | None):
        tensors = {n: t[:, tokens].contiguous() if n in PER_TOKEN else t for n, t in inputs.tensors.items()}
        if state is not None:
            tensors["initial_state"] = state
        piece = replace(inputs, tensors=tensors, case=replace(inputs.case, T=length, initial_state="initial_state" in tensors))
        ctx.supported(piece)
        return ctx.call(piece)

    first, state = part(slice(0, cut), cut, None)
    second, state = part(slice(cut, T), T - cut, state)
    ctx.judged(inputs, (torch.cat([first, second], dim=1), state), f"halves joined at token {cut}")


def reruns(ctx: Context) -> None:
    """30 calls on the same inputs give the same bits (one more under the emulator, where a call takes seconds)."""
    inputs, before = ctx.base()
    for n in range(1 if ctx.slow else 30):
        same(f"of rerun {n + 1} on the same inputs", ctx.call(inputs), before)


def inputs_untouched(ctx: Context) -> None:
    """No input tensor, initial state included, is written to."""
    cell = ctx.probe._replace(case=replace(ctx.probe.case, initial_state=True))
    inputs = ctx.draw("untouched", cell=cell)
    try:
        ctx.supported(inputs)
    except NotRun:
        inputs = ctx.draw("untouched")
        ctx.supported(inputs)
    before = inputs.clone()
    ctx.call(inputs)
    ctx.synchronize()
    for name, t in inputs.tensors.items():
        if difference := first_difference(t, before.tensors[name]):
            raise Failure(f"writes into the caller's {name}: {difference}")


def alternating(ctx: Context) -> None:
    """Right when shapes, dtypes and forms alternate in one process, and right again for the first."""
    case = ctx.probe.case
    other = "float16" if case.dtype == "bfloat16" else "bfloat16"
    pre, prod = (ctx.probe._replace(form=form) for form in ("pre", "prod"))
    longer, fewer = replace(case, T=case.T + 64), replace(case, B=case.B + 1)
    steps = [pre, prod, pre._replace(case=replace(case, dtype=other)), pre._replace(case=longer)]
    if not ctx.slow:
        steps += [prod._replace(case=replace(case, dtype=other)), prod._replace(case=fewer)]
    ran, declined = 0, []
    for n, cell in enumerate([*steps, pre]):
        inputs = ctx.draw("alternating", n, cell=cell)
        try:
            ctx.supported(inputs)
        except NotRun as reason:
            declined.append(str(reason))
            continue
        ran += 1
        c = cell.case
        ctx.judged(inputs, ctx.call(inputs), f"call {n + 1} of alternating ones (B={c.B}, T={c.T}, {c.dtype}, form {cell.form})")
    if ran < 2:
        raise NotRun(declined[0])
