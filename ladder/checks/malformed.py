"""Calls that no rung may accept: each is refused in one line that names the argument, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.kda.contract import ContractError, Unsupported
from ladder.checks.context import Context, Failure
from ladder.judge import starved

Call = dict[str, Any]


def run(ctx: Context) -> dict[str, list[str]]:
    """Outcome -> lines. Raises Failure where any malformed call is accepted, or refused in any other way."""
    refused, failed = [], []
    for form in ("pre", "prod"):
        case = replace(ctx.probe.case, B=2, T=65, H=2, HV=4, K=64, V=128, initial_state=True)
        inputs = ctx.draw("malformed", cell=ctx.probe._replace(case=case, form=form, regime="strong"))
        for name, (argument, change) in _cases(form, ctx.device).items():
            wrong = _refusal(ctx, {**inputs.call(), **change(inputs.call())}, argument)
            (failed if wrong else refused).append(f"{name} ({form}): {wrong}" if wrong else f"{name} ({form})")
    tally = {"passed": [], "refused": refused, "inherited": [], "failed": failed}
    if failed:
        raise Failure(f"{len(failed)} of {len(failed) + len(refused)} malformed calls are not refused: {'; '.join(failed[:4])}", cases=tally)
    return tally


def _refusal(ctx: Context, call: Call, argument: str) -> str:
    """What is wrong with how the call is refused, or ""."""
    launched = len(ctx.launches()) if ctx.launches else 0
    try:
        ctx.rung.chunk_kda(**call)
    except (ContractError, Unsupported) as refusal:
        line = str(refusal)
        if ctx.launches and len(ctx.launches()) != launched:
            return f"refused only after kernels were launched: {line}"
        return "" if argument in line.partition(":")[0] and "\n" not in line else f"refused without naming {argument} in one line: {line}"
    except Exception as error:
        if starved(error):
            raise
        return f"raised {type(error).__name__}, accepted: Unsupported or ContractError ({' '.join(str(error).split())[:120]})"
    return "accepted"


def _cases(form: str, device: torch.device) -> dict[str, tuple[str, Callable[[Call], Call]]]:
    """name -> (the argument that the refusal must name, what to change in a good call)."""
    elsewhere = "cpu" if device.type == "cuda" else "meta"

    def each(names: str, change: Callable[[torch.Tensor], Any]) -> dict[str, Callable[[Call], Call]]:
        return {name: (lambda call, name=name: {name: change(call[name])}) for name in names.split()}

    tensors = "q k v g beta initial_state" + (" A_log dt_bias" if form == "prod" else "")
    families = {
        "{} on another device": each(tensors.replace("q ", ""), lambda t: t.to(elsewhere)),
        "{} requires grad": each(tensors, lambda t: t.clone().requires_grad_()),
        "{} of integers": each(tensors, lambda t: torch.ones_like(t, dtype=torch.int32)),
        "{} with a dimension more": each(tensors, lambda t: t[None]),
        "{} longer in its last dimension": each(tensors.replace("q ", "").replace("v ", ""), lambda t: torch.cat([t, t], -1)),
        "{} not a tensor": each("q k v g beta", lambda t: t.tolist()),
        "{} in fp32": each("q k v", lambda t: t.float()),
        "{} in another half type": each("k v", lambda t: t.to(torch.float16 if t.dtype == torch.bfloat16 else torch.bfloat16)),
        "{} sparse": each(tensors, lambda t: t.to_sparse()),
        "{} in half": each("initial_state" + (" A_log dt_bias" if form == "prod" else ""), lambda t: t.half()),
    }  # fmt: skip
    out = {kind.format(name): (name, change) for kind, changes in families.items() for name, change in changes.items()}
    tokens = ("q", "k", "v", "g", "beta")
    out |= {
        "no token": ("q", lambda c: {n: c[n][:, :0] for n in tokens}),
        "no sequence": ("q", lambda c: {n: c[n][:0] for n in (*tokens, "initial_state")}),
        "no value channel": ("q", lambda c: {"v": c["v"][..., :0], "initial_state": c["initial_state"][..., :0]}),
        "value heads no multiple": ("v", lambda c: {"v": c["v"][:, :, :3]}),
        "state laid out V x K": ("initial_state", lambda c: {"initial_state": c["initial_state"].transpose(2, 3).contiguous()}),
        "ragged batch": ("cu_seqlens", lambda c: {"cu_seqlens": torch.tensor([0, 65], dtype=torch.int32, device=device)}),
        "every tensor on meta": ("q", lambda c: {n: t.to("meta") for n, t in c.items() if isinstance(t, torch.Tensor)}),
        "a scale that is no number": ("scale", lambda c: {"scale": "large"}),
        "a scale in a list": ("scale", lambda c: {"scale": [1.0]}),
        "a scale that is a tensor": ("scale", lambda c: {"scale": torch.ones((), device=device)}),
        "a scale that is NaN": ("scale", lambda c: {"scale": float("nan")}),
        "a keyword nobody knows": ("chunk_dize", lambda c: {"chunk_dize": 32}),
    }  # fmt: skip
    if form == "pre":
        out["a bound without a raw gate"] = ("lower_bound", lambda c: {"lower_bound": -5.0})
        out["A_log without a raw gate"] = ("A_log", lambda c: {"A_log": torch.zeros(4, device=device)})
    else:
        out["no A_log"] = ("A_log", lambda c: {"A_log": None})
        out["safe gate without a bound"] = ("lower_bound", lambda c: {"lower_bound": None})
        out["a bound that is too low"] = ("lower_bound", lambda c: {"lower_bound": -6.0})
        out["a bound that is no decay"] = ("lower_bound", lambda c: {"lower_bound": 0.0})
        out["a bound that is no number"] = ("lower_bound", lambda c: {"lower_bound": "-5"})
        out["a bound that is NaN"] = ("lower_bound", lambda c: {"lower_bound": float("nan")})
    return out
