"""Rung 004: the intra stage is ours and emits a zero-padded Aqk.

One Triton kernel (intra.py) computes Aqk, the inverse, w, u, qg and kg per chunk and stores the zeros above the
diagonal as it goes, so that neither the fill in front of the state kernel nor Akk's memset and round trip through
memory is left. The other way, a write-only fill in front of fla's kernels, stands in intra_fla.py (the notes compare
them). Equations: kernels/kda/ALGORITHM.md.

| stage     | kernels                                                 | leaves                                      |
|-----------|---------------------------------------------------------|---------------------------------------------|
| normalise | l2norm (q, k), beta sigmoid; nothing for form `pre`     | q, k, beta                                  |
| gate      | gate + chunk-local cumsum, or cumsum alone              | g2 [B,T,HV,K] fp32, log2 units              |
| intra     | kda_intra_fused                                         | Aqk, w, qg, kg [B,T,HV,K], u [B,T,HV,V]     |
| state     | kda_state                                               | o [B,T,HV,V], final_state                   |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from fla.modules.norm.l2norm import l2norm_fwd
from fla.ops.common.gate import fused_beta_sigmoid_fwd
from fla.ops.kda.gate import kda_gate_chunk_cumsum
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import CHUNK, Problem, Stage, dense, kda_op

from .intra import KERNELS, intra_fused

STATE = {"sm_90a": "state_sm90.py", "sm_100a": "state_sm100.py", "sm_103a": "state_sm100.py"}
CALLS = CallCache()


SMS = 132  # of an H100 or H200: CTAs that run at once, one per SM


def unit(arch: str, K: int, V: int, dtype: str, has_h0: bool, wide: bool) -> Unit:
    """wide: on Hopper, a CTA walks 128 columns of V instead of 64."""
    params = (("K", K), ("V", V), ("dtype", dtype), ("has_h0", has_h0))
    if arch == "sm_90a":
        params += (("v_tile", 128 if wide else 64),)
    return Unit("kda_state", Path(__file__).parent / STATE[arch], arch, params)


UNITS = tuple(
    partial(unit, K=K, V=V, dtype=dtype, has_h0=has_h0, wide=wide)
    for K, V, tiles in ((64, 64, (False,)), (128, 128, (False, True)), (128, 256, (False, True)))
    for dtype in ("bfloat16", "float16") for has_h0 in (False, True) for wide in tiles
)  # fmt: skip


def unsupported(p: Problem) -> str | None:
    """What the intra and state kernels are not written for."""
    if p.K not in (64, 128):
        return f"q: given K = {p.K}, accepted: 64 or 128"
    if p.V % 64:
        return f"v: given V = {p.V}, accepted: a multiple of 64"
    return None


def normalise(p: Problem, x: dict) -> dict:
    out = {name: x[name].contiguous() for name in ("q", "k", "v", "g", "beta")}
    if p.l2norm:
        out["q"], _ = l2norm_fwd(out["q"])
        out["k"], _ = l2norm_fwd(out["k"])
    if p.beta_sigmoid:
        out["beta"] = fused_beta_sigmoid_fwd(out["beta"])
    return out


def gate(p: Problem, x: dict) -> dict:
    if p.gate == "log":
        return {"g2": chunk_local_cumsum(x["g"], scale=RCP_LN2, chunk_size=CHUNK)}
    return {"g2": kda_gate_chunk_cumsum(x["g"], A_log=x["A_log"], dt_bias=x["dt_bias"], scale=RCP_LN2,
                                        chunk_size=CHUNK, lower_bound=p.lower_bound)}  # fmt: skip


def intra(p: Problem, x: dict) -> dict:
    return intra_fused(x["q"], x["k"], x["v"], x["g2"], x["beta"], p.scale, bounded=p.safe_gate, arch=target.current().arch)


def state(p: Problem, x: dict) -> dict:
    """Scan and output in one kernel. The decay is read from g2's last row per chunk, inside."""
    operands = (x["qg"], x["w"], x["kg"], x["u"], x["Aqk"], x["g2"], *dense(p, x, "initial_state"))
    where = target.current()
    plan = CALLS.plan((p, where), partial(plan_state, where, p))
    o, final_state = plan.allocate(x["u"])
    plan.run(*operands, o, final_state, *plan.scalars)
    return {"o": o, "final_state": final_state}


def plan_state(where: target.Target, p: Problem) -> Plan:
    wide = p.V % 128 == 0 and p.B * p.HV * p.V // 64 > SMS  # 128 moves the fewest bytes, 64 gives twice the CTAs
    run = where.load(unit(where.arch, p.K, p.V, str(p.io_dtype).removeprefix("torch."), p.initial_state, wide))
    return Plan(run, (Spec((p.B, p.T, p.HV, p.V), p.io_dtype), Spec((p.B, p.HV, p.K, p.V), torch.float32)), (p.scale,))


STAGES = (
    Stage("normalise", ("l2norm_fwd_kernel", "fused_beta_sigmoid_fwd_kernel"), normalise),
    Stage("gate", ("cumsum",), gate),
    Stage("intra", KERNELS, intra),
    Stage("state", ("kda_state",), state),
)

chunk_kda = kda_op(STAGES, unsupported)
