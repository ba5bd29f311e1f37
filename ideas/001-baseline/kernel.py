"""Rung 001: fla 0.6's forward, as its separate stages.

Every stage calls the Triton kernels of `fla.ops` the way `fla.ops.kda.chunk_fwd.chunk_kda_fwd` does, so that later
rungs can replace them one at a time and each can be timed on its own. Numbers: kernels/kda/ALGORITHM.md.

| stage     | kernels                                                 | leaves                                      |
|-----------|---------------------------------------------------------|---------------------------------------------|
| normalise | l2norm (q, k), beta sigmoid; nothing for form `pre`     | q, k, beta                                  |
| gate      | gate + chunk-local cumsum, or cumsum alone              | g2 [B,T,HV,K] fp32, log2 units              |
| intra     | diagonal 16x16 blocks, then off-diagonal + inverse      | Aqk, Akk [B,T,HV,64] (Akk is the inverse)   |
| wu        | w = A (beta k 2^g2), u = A (beta v), kg                 | w, kg [B,T,HV,K], u [B,T,HV,V]              |
| scan      | serial over chunks                                      | h [B,NT,HV,K,V], v_new, final_state         |
| output    | o = scale q 2^g2 h + Aqk v_new                          | o [B,T,HV,V]                                |
"""

from __future__ import annotations

import torch
import triton
from fla.modules.norm.l2norm import l2norm_fwd
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
from fla.ops.common.gate import fused_beta_sigmoid_fwd
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda import chunk_intra
from fla.ops.kda.chunk_intra_token_parallel import chunk_kda_fwd_intra_token_parallel
from fla.ops.kda.gate import kda_gate_chunk_cumsum
from fla.ops.kda.wy_fast import recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from kernels.kda.contract import CHUNK, Problem, Stage, kda_op

SUB_CHUNK = 16  # rows of a diagonal block
GATE_SHIFT = 2.0 * RCP_LN2  # fla's default: the anchor sits (SUB_CHUNK - 1) / 2 steps of 2 nats below the block's first row

UNITS = ()


def unsupported(p: Problem) -> str | None:
    """fla's own limit: head dimension K at most 256."""
    return None if p.K <= 256 else f"q: given K = {p.K}, accepted: at most 256"


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
    w, u, _, kg = recompute_w_u_fwd(k=x["k"], v=x["v"], beta=x["beta"], A=x["Akk"], gk=x["g2"])
    return {"w": w, "u": u, "kg": kg}


def scan(p: Problem, x: dict) -> dict:
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        k=x["kg"], w=x["w"], u=x["u"], gk=x["g2"], initial_state=_contiguous(x["initial_state"]),
        output_final_state=p.output_final_state)  # fmt: skip
    return {"h": h, "v_new": v_new, "final_state": final_state}


def output(p: Problem, x: dict) -> dict:
    return {"o": chunk_gla_fwd_o_gk(q=x["q"], v=x["v_new"], g=x["g2"], A=x["Aqk"], h=x["h"], scale=p.scale, chunk_size=CHUNK)}


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


STAGES = (
    Stage("normalise", ("l2norm_fwd_kernel", "fused_beta_sigmoid_fwd_kernel"), normalise),
    Stage("gate", ("cumsum",), gate),
    Stage("intra", ("chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_intra_token_parallel",
                    "chunk_kda_fwd_kernel_inter_solve_fused"), intra),
    Stage("wu", ("recompute_w_u_fwd_kda_kernel",), wu),
    Stage("scan", ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64",), scan),
    Stage("output", ("chunk_gla_fwd_kernel_o",), output),
)

chunk_kda = kda_op(STAGES, unsupported)
