"""Rung 003: the state kernel of 002, warp-specialised.

Loads, products, the recurrence and the output run in warps of their own and overlap (state_sm90.py, state_sm100.py).
Its MMA contracts whole 64x64 tiles of Aqk, whose blocks above the diagonal fla leaves unwritten, so they are filled with
zeros in place first. Equations: kernels/kda/ALGORITHM.md.

| stage     | kernels                                                 | leaves                                      |
|-----------|---------------------------------------------------------|---------------------------------------------|
| normalise | l2norm (q, k), beta sigmoid; nothing for form `pre`     | q, k, beta                                  |
| gate      | gate + chunk-local cumsum, or cumsum alone              | g2 [B,T,HV,K] fp32, log2 units              |
| intra     | diagonal 16x16 blocks, then off-diagonal + inverse      | Aqk, Akk [B,T,HV,64] (Akk is the inverse)   |
| wu        | w = A (beta k 2^g2), u = A (beta v), qg, kg             | w, qg, kg [B,T,HV,K], u [B,T,HV,V]          |
| state     | zero_upper, kda_state                                   | o [B,T,HV,V], final_state                   |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import triton
from fla.modules.norm.l2norm import l2norm_fwd
from fla.ops.common.gate import fused_beta_sigmoid_fwd
from fla.ops.kda import chunk_intra
from fla.ops.kda.chunk_intra_token_parallel import chunk_kda_fwd_intra_token_parallel
from fla.ops.kda.gate import kda_gate_chunk_cumsum
from fla.ops.kda.wy_fast import recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import CHUNK, Problem, Stage, dense, kda_op

from .zero_upper import zero_upper_

SUB_CHUNK = 16  # rows of a diagonal block
GATE_SHIFT = 2.0 * RCP_LN2  # fla's default: the anchor sits (SUB_CHUNK - 1) / 2 steps of 2 nats below the block's first row

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
    """What the state kernel is not written for."""
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
    """Aqk's blocks above the diagonal stay unwritten, as fla leaves them; Akk is zeroed first."""
    q, k, beta, g2 = x["q"], x["k"], x["beta"], x["g2"]
    Aqk = q.new_empty(p.B, p.T, p.HV, CHUNK)
    Akk = q.new_zeros(p.B, p.T, p.HV, CHUNK)
    diagonal = q.new_empty(p.B, p.T, p.HV, SUB_CHUNK, dtype=torch.float32)
    shared = {"scale": p.scale, "cu_seqlens": None, "T": p.T, "H": p.H, "HV": p.HV, "K": p.K, "BT": CHUNK, "BC": SUB_CHUNK}
    if p.safe_gate:
        chunk_intra.chunk_kda_fwd_kernel_intra_sub_chunk[(p.NT, CHUNK // SUB_CHUNK, p.B * p.HV)](
            q=q, k=k, g=g2, beta=beta, Aqk=Aqk, Akk=diagonal, chunk_indices=None, BK=triton.next_power_of_2(p.K),
            GATE_SHIFT=GATE_SHIFT, USE_GATHER=chunk_intra.IS_GATHER_SUPPORTED, **shared)  # fmt: skip
    else:
        chunk_kda_fwd_intra_token_parallel(q=q, k=k, gk=g2, beta=beta, Aqk=Aqk, Akk=diagonal, scale=p.scale,
                                           chunk_size=CHUNK, sub_chunk_size=SUB_CHUNK)  # fmt: skip
    chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused[(p.NT, p.B * p.HV)](
        q=q, k=k, g=g2, beta=beta, Aqk=Aqk, Akkd=diagonal, Akk=Akk, chunk_indices=None, NC=CHUNK // SUB_CHUNK,
        USE_SAFE_GATE=p.safe_gate, **shared)  # fmt: skip
    return {"Aqk": Aqk, "Akk": Akk}


def wu(p: Problem, x: dict) -> dict:
    w, u, qg, kg = recompute_w_u_fwd(k=x["k"], v=x["v"], beta=x["beta"], A=x["Akk"], gk=x["g2"], q=x["q"])
    return {"w": w, "u": u, "qg": qg, "kg": kg}


def state(p: Problem, x: dict) -> dict:
    """Scan and output in one kernel. The decay is read from g2's last row per chunk, inside."""
    zero_upper_(x["Aqk"])
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
    Stage("intra", ("chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_intra_token_parallel",
                    "chunk_kda_fwd_kernel_inter_solve_fused"), intra),
    Stage("wu", ("recompute_w_u_fwd_kda_kernel",), wu),
    Stage("state", ("kda_zero_upper", "kda_state"), state),
)

chunk_kda = kda_op(STAGES, unsupported)
