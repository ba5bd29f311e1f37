"""Zeroes the part above the diagonal of every 64 x 64 tile of Aqk, in place.

fla's intra kernels leave it unwritten, and a state kernel that contracts whole tiles would read it. A masked
fill, never a multiply: what lies there may be NaN. Nothing is read, and nothing on or below the diagonal is written.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

KERNELS = ("kda_zero_upper",)


@triton.jit(do_not_specialize=["T", "HV"])
def kda_zero_upper(Aqk, T, HV, BH: tl.constexpr):
    """One program per token and block of BH heads: the row index inside the tile is one scalar."""
    i_bt = tl.program_id(0).to(tl.int64)
    i = ((i_bt % T) % 64).to(tl.int32)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    row = Aqk + i_bt * HV * 64 + o_h * 64
    o_j = tl.arange(0, 64)[None, :]                     # whole 16-byte vectors past the one that holds the diagonal
    tl.store(row + o_j, tl.zeros([BH, 64], Aqk.dtype.element_ty), mask=(o_h < HV) & (o_j // 8 > i // 8))
    o_j = (i // 8) * 8 + tl.arange(0, 8)[None, :]       # the rest of that vector
    tl.store(row + o_j, tl.zeros([BH, 8], Aqk.dtype.element_ty), mask=(o_h < HV) & (o_j > i))


def zero_upper_(Aqk: torch.Tensor) -> torch.Tensor:
    """Aqk [B,T,HV,64], any 16-bit float, contiguous: entries of columns j > t mod 64 become 0. Returns Aqk."""
    B, T, HV, _ = Aqk.shape
    BH = min(32, triton.next_power_of_2(HV))
    kda_zero_upper[(B * T, triton.cdiv(HV, BH))](Aqk, T, HV, BH=BH, num_warps=4)
    return Aqk
