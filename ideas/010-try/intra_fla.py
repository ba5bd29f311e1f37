"""The other way to a zero-padded Aqk, kept for comparison: a write-only fill in front of fla's kernels.

fla leaves the part above each diagonal unwritten in Aqk and clears all of Akk with a memset. Here one launch stores
zeros over both before the intra kernels write below the diagonal; nothing is read back. `intra_fla` returns
what `intra.intra_fused` does.
"""
from __future__ import annotations

import importlib

import torch
import triton
import triton.language as tl

CHUNK, ROWS = 64, 128
KERNELS = ("kda_zero_pair", "chunk_kda_fwd_kernel_intra", "chunk_kda_fwd_kernel_inter_solve_fused",
           "recompute_w_u_fwd_kda_kernel")


@triton.jit(do_not_specialize=["rows"])
def kda_zero_pair(a, b, rows, ROWS: tl.constexpr):
    """Stores zeros over a and b, both [rows, 64]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offset = row * 64 + tl.arange(0, 64)[None, :]
    zero = tl.zeros([ROWS, 64], a.dtype.element_ty)
    tl.store(a + offset, zero, mask=row < rows)
    tl.store(b + offset, zero, mask=row < rows)


def intra_fla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g2: torch.Tensor, beta: torch.Tensor,
              scale: float, safe_gate: bool = False) -> dict[str, torch.Tensor]:
    """Same arguments and results as `intra.intra_fused`; safe_gate picks fla's tensor-core diagonal kernel."""
    intra = importlib.import_module("fla.ops.kda.chunk_intra")
    token_parallel = importlib.import_module("fla.ops.kda.chunk_intra_token_parallel")
    wy = importlib.import_module("fla.ops.kda.wy_fast")
    B, T, H, K = q.shape
    HV = v.shape[2]
    NT, BC = triton.cdiv(T, CHUNK), 16
    Aqk = torch.empty(B, T, HV, CHUNK, dtype=q.dtype, device=q.device)
    Akk = torch.empty_like(Aqk)
    diagonal = torch.empty(B, T, HV, BC, dtype=torch.float32, device=q.device)
    rows = B * T * HV
    kda_zero_pair[(triton.cdiv(rows, ROWS),)](Aqk, Akk, rows, ROWS=ROWS, num_warps=4)
    common = dict(q=q, k=k, g=g2, beta=beta, Aqk=Aqk, scale=scale, cu_seqlens=None,
                  T=T, H=H, HV=HV, K=K, BT=CHUNK, BC=BC)
    if safe_gate:
        intra.chunk_kda_fwd_kernel_intra_sub_chunk[(NT, CHUNK // BC, B * HV)](
            Akk=diagonal, chunk_indices=None, BK=triton.next_power_of_2(K), GATE_SHIFT=2 * intra.RCP_LN2,
            USE_GATHER=intra.IS_GATHER_SUPPORTED, **common)
    else:
        token_parallel.chunk_kda_fwd_intra_token_parallel(
            q=q, k=k, gk=g2, beta=beta, Aqk=Aqk, Akk=diagonal, scale=scale, chunk_size=CHUNK, sub_chunk_size=BC)
    intra.chunk_kda_fwd_kernel_inter_solve_fused[(NT, B * HV)](
        Akkd=diagonal, Akk=Akk, chunk_indices=None, NC=CHUNK // BC, USE_SAFE_GATE=safe_gate, **common)
    w, u, qg, kg = wy.recompute_w_u_fwd(k=k, v=v, beta=beta, A=Akk, gk=g2, q=q)
    return {"Aqk": Aqk, "w": w, "u": u, "qg": qg, "kg": kg}
