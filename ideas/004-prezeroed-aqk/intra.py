"""Intra stage of rung 004: Aqk stored with its zeros, and w, u, qg, kg, in one Triton kernel.

Equation numbers are those of kernels/kda/ALGORITHM.md. Per chunk of C = 64 tokens and value head, with
G the inclusive cumsum of the log decay inside the chunk (log2 units) and r_ij = 2^(G_i - G_j) per channel:

    Aqk_ij = scale * sum_c q_ic k_jc r_ijc  for j <= i, else 0                         (9)
    L_ij   = beta_i * sum_c k_ic k_jc r_ijc for j < i,  else 0;   A = (I + L)^-1       (8), (10)
    w = A (beta k 2^G),  u = A (beta v),  qg = q 2^G,  kg = k 2^(G_last - G)           (11), (12)

Exponents. The chunk is split dyadically (section 4): at level s = 32, 16, 8, 4, 2, 1 neighbouring blocks of s rows form
couples; for i in the later block of a couple and j in the earlier one, the later block's first row m is
the anchor, and both 2^(G_i - G_m) and 2^(G_m - G_j) are at most 1 for any gate, however strong. No later row
is read, so earlier outputs do not depend on later tokens in any bit. A level costs one exponential per element,
because each row belongs to one block of it. With `BOUNDED` (log decay of at least -5 a token, the caller's
promise) levels 8 to 1 are one product around the block's first row, shifted by a constant so that both
factors stay in bf16's range.

The inverse climbs the same tree (13): D_1 = I, D_2s = D_s - D_s L_s D_s, L_s being the level's part of L.

Rounding (section 5): decayed q and k to the io dtype before each product (bf16 if `BOUNDED`), fp32
accumulation; L and D fp32, their products tf32; A, beta k 2^G, beta v to the io dtype; every output once.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64
KERNELS = ("kda_intra_fused",)  # device kernels that `intra_fused` launches
SHIFT = tl.constexpr(57.0)      # log2; 15 tokens of -5 nats span 2^-108.2: both factors stay within 2^+-57
BOUND = -5.0                    # nats a token, the lowest decay that `bounded` allows for


@triton.jit
def _level(b_g, b_a, b_q, b_k, later, io: tl.constexpr):
    """Decayed q and k of one level: exponent G - G_anchor for rows of the later block, its negative for the earlier."""
    e = tl.exp2((b_g - b_a) * tl.where(later, 1.0, -1.0))
    return (b_q * e).to(io), (b_k * e).to(io)


@triton.jit
def kda_intra_diagonal(q, k, g, beta, Aqk, scale, n, s_qk, HV,
                       K: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr):
    """Levels 8 to 1: stores the four 16 x 16 diagonal blocks of Aqk, returns their inverses D [4,16,16]."""
    io = q.dtype.element_ty
    s_g = HV * K
    o_b = tl.arange(0, 4)[:, None, None]
    o_i = tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    t = o_b * 16 + o_i
    live = t < n
    q0 = tl.zeros([4, 16, 16], tl.float32)
    k0 = tl.zeros([4, 16, 16], tl.float32)
    q1 = tl.zeros([4, 16, 16], tl.float32)
    k1 = tl.zeros([4, 16, 16], tl.float32)
    q2 = tl.zeros([4, 16, 16], tl.float32)
    k2 = tl.zeros([4, 16, 16], tl.float32)
    q3 = tl.zeros([4, 16, 16], tl.float32)
    k3 = tl.zeros([4, 16, 16], tl.float32)
    b_qk = tl.zeros([4, 16, BK], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)[None, None, :]
        b_g = tl.load(g + tl.minimum(t, n - 1) * s_g + o_k)
        b_k = tl.load(k + t * s_qk + o_k, mask=live, other=0.0).to(tl.float32)
        b_q = tl.load(q + t * s_qk + o_k, mask=live, other=0.0).to(tl.float32)
        if BOUNDED:
            b_d = b_g - tl.load(g + tl.minimum(o_b * 16, n - 1) * s_g + o_k) + SHIFT
            b_e = tl.exp2(b_d)
            b_t = tl.permute((b_k * tl.exp2(-b_d)).to(tl.bfloat16), (0, 2, 1))
            q0 = tl.dot((b_q * b_e).to(tl.bfloat16), b_t, q0)
            k0 = tl.dot((b_k * b_e).to(tl.bfloat16), b_t, k0)
        else:
            b_qk += b_q * b_k
            for level in tl.static_range(4):
                anchor = tl.minimum((t & (64 - (2 << level))) + (1 << level), n - 1)
                xq, xk = _level(b_g, tl.load(g + anchor * s_g + o_k), b_q, b_k, (t & (1 << level)) != 0, io)
                b_t = tl.permute(xk, (0, 2, 1))
                if level == 0:
                    q0 = tl.dot(xq, b_t, q0)
                    k0 = tl.dot(xk, b_t, k0)
                elif level == 1:
                    q1 = tl.dot(xq, b_t, q1)
                    k1 = tl.dot(xk, b_t, k1)
                elif level == 2:
                    q2 = tl.dot(xq, b_t, q2)
                    k2 = tl.dot(xk, b_t, k2)
                else:
                    q3 = tl.dot(xq, b_t, q3)
                    k3 = tl.dot(xk, b_t, k3)
    apart = o_i ^ o_j                                   # its highest bit is the level at which i and j part
    if not BOUNDED:                                     # a product is right inside its couples, finite elsewhere
        b_diag = tl.sum(b_qk, axis=2)[:, :, None]
        q0 = tl.where(apart < 4, tl.where(apart < 2, q0, q1), tl.where(apart < 8, q2, q3))
        q0 = tl.where(apart == 0, b_diag, q0)
        k0 = tl.where(apart < 4, tl.where(apart < 2, k0, k1), tl.where(apart < 8, k2, k3))
    q0 = tl.where(o_i >= o_j, q0 * scale, 0.0)
    tl.store(Aqk + t * (HV * 64) + o_b * 16 + o_j, q0.to(io), mask=live)
    b_beta = tl.load(beta + t * HV, mask=live, other=0.0).to(tl.float32)
    b_L = tl.where(o_i > o_j, k0 * b_beta, 0.0)
    b_D = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, b_L, 0.0)
    for level in tl.static_range(1, 4):                 # (13)
        b_Ls = tl.where((apart >= (1 << level)) & (apart < (2 << level)), b_L, 0.0)
        b_D -= tl.dot(tl.dot(b_D, b_Ls, input_precision="tf32"), b_D, input_precision="tf32")
    return b_D


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])       # one compilation for all shapes of a (K, V, dtype)
def kda_intra_fused(q, k, v, g, beta, Aqk, w, u, qg, kg, scale, T, NT, H, HV,
                    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BKD: tl.constexpr, BV: tl.constexpr, BOUNDED: tl.constexpr):
    """One program per (batch, chunk, value head), heads fastest: neighbouring programs read neighbouring memory.

    q, k [B,T,H,K]; v, u [B,T,HV,V]; g [B,T,HV,K] fp32 log2; beta [B,T,HV]; Aqk [B,T,HV,64]; w, qg, kg [B,T,HV,K].
    Rows past T (last chunk): q, k, v, beta read as 0, the decay as the last row's, so every factor stays finite.
    """
    pid = tl.program_id(0)
    i_hv = pid % HV
    i_c = (pid // HV) % NT
    i_b = pid // HV // NT
    n = tl.minimum(T - i_c * 64, 64)
    i_t = i_b.to(tl.int64) * T + i_c * 64
    io = q.dtype.element_ty
    s_qk = H * K
    s_g = HV * K
    q += (i_t * H + i_hv // (HV // H)) * K
    k += (i_t * H + i_hv // (HV // H)) * K
    g += (i_t * HV + i_hv) * K
    v += (i_t * HV + i_hv) * V
    u += (i_t * HV + i_hv) * V
    w += (i_t * HV + i_hv) * K
    qg += (i_t * HV + i_hv) * K
    kg += (i_t * HV + i_hv) * K
    beta += i_t * HV + i_hv
    Aqk += (i_t * HV + i_hv) * 64

    # levels 32 and 16: operands zeroed outside the couples, so that both levels share one accumulator
    o_i = tl.arange(0, 64)[:, None]
    o_j = tl.arange(0, 64)[None, :]
    live = o_i < n
    upper = (o_i & 32) != 0
    row = tl.minimum(o_i, n - 1) * s_g
    anchor16 = tl.minimum((o_i & 32) + 16, n - 1) * s_g
    anchor32 = tl.minimum(32, n - 1) * s_g
    b_Aqk = tl.zeros([64, 64], tl.float32)
    b_L = tl.zeros([64, 64], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        b_g = tl.load(g + row + o_k)
        b_k = tl.load(k + o_i * s_qk + o_k, mask=live, other=0.0).to(tl.float32)
        b_q = tl.load(q + o_i * s_qk + o_k, mask=live, other=0.0).to(tl.float32)
        tl.store(qg + o_i * s_g + o_k, (b_q * tl.exp2(b_g)).to(io), mask=live)                       # (12)
        b_last = tl.load(g + (n - 1) * s_g + o_k)
        tl.store(kg + o_i * s_g + o_k, (b_k * tl.exp2(b_last - b_g)).to(io), mask=live)

        xq, xk = _level(b_g, tl.load(g + anchor32 + o_k), b_q, b_k, upper, io)
        b_t = tl.trans(tl.where(upper, 0.0, xk))
        b_Aqk = tl.dot(tl.where(upper, xq, 0.0), b_t, b_Aqk)
        b_L = tl.dot(tl.where(upper, xk, 0.0), b_t, b_L)

        xq, xk = _level(b_g, tl.load(g + anchor16 + o_k), b_q, b_k, (o_i & 16) != 0, io)
        b_t = tl.trans(xk)
        b_Aqk = tl.dot(tl.where(upper, 0.0, xq), b_t, b_Aqk)       # block (1, 0); else diagonal or above
        b_L = tl.dot(tl.where(upper, 0.0, xk), b_t, b_L)
        b_t = tl.trans(tl.where(upper, xk, 0.0))
        b_Aqk = tl.dot(xq, b_t, b_Aqk)                             # block (3, 2); else diagonal or above
        b_L = tl.dot(xk, b_t, b_L)

    block_i = o_i // 16
    block_j = o_j // 16
    below = block_i > block_j
    b_Aqk = tl.where(below, b_Aqk * scale, 0.0)
    tl.store(Aqk + o_i * (HV * 64) + o_j, b_Aqk.to(io), mask=live & (block_i != block_j))

    # (13), levels 16 and 32; the diagonal only now, so that its registers and those of the products above are not alive at once
    b_D16 = kda_intra_diagonal(q, k, g, beta, Aqk, scale, n, s_qk, HV, K, BKD, BOUNDED)
    b_beta = tl.load(beta + o_i * HV, mask=live, other=0.0).to(tl.float32)
    b_L = tl.where(below, b_L * b_beta, 0.0)
    b_D = tl.reshape(tl.broadcast_to(b_D16[:, :, None, :], (4, 16, 4, 16)), (64, 64))
    b_D = tl.where(block_i == block_j, b_D, 0.0)
    b_Ls = tl.where((block_i ^ block_j) == 1, b_L, 0.0)
    b_D -= tl.dot(tl.dot(b_D, b_Ls, input_precision="tf32"), b_D, input_precision="tf32")
    b_Ls = tl.where((block_i ^ block_j) >= 2, b_L, 0.0)
    b_D -= tl.dot(tl.dot(b_D, b_Ls, input_precision="tf32"), b_D, input_precision="tf32")
    b_A = b_D.to(io)

    # (11)
    BW: tl.constexpr = BV if K % BV == 0 else K
    for i_v in tl.static_range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)[None, :]
        b_v = tl.load(v + o_i * (HV * V) + o_v, mask=live, other=0.0)
        b_u = tl.dot(b_A, (b_v * b_beta).to(io))
        tl.store(u + o_i * (HV * V) + o_v, b_u.to(io), mask=live)
    for i_k in tl.static_range(0, K, BW):
        o_k = i_k + tl.arange(0, BW)[None, :]
        b_e = tl.exp2(tl.load(g + row + o_k)) * b_beta
        b_k = tl.load(k + o_i * s_qk + o_k, mask=live, other=0.0)
        b_w = tl.dot(b_A, (b_k * b_e).to(io))
        tl.store(w + o_i * s_g + o_k, b_w.to(io), mask=live)


def intra_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g2: torch.Tensor, beta: torch.Tensor,
                scale: float, bounded: bool = False, arch: str = "sm_90a") -> dict[str, torch.Tensor]:
    """Aqk [B,T,HV,64], w, qg, kg [B,T,HV,K] and u [B,T,HV,V], in the dtype of q, from one launch.

    q, k [B,T,H,K] and v [B,T,HV,V] bf16 or fp16, contiguous; g2 [B,T,HV,K] fp32, log2 units, cumulated inside each
    chunk of 64; beta [B,T,HV] any float. H divides HV; K is 64 or 128; V a multiple of 64; any T.
    Aqk carries the scale and is exactly zero above its diagonal and in the columns of tokens past T.
    bounded: the caller's promise that no token decays by more than exp(BOUND); used for bf16 only, since the
    shifted operands are bf16 and would cost fp16 its mantissa. Checks nothing: the rung's `unsupported` does.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    NT = triton.cdiv(T, CHUNK)
    bounded = bounded and q.dtype == torch.bfloat16

    def empty(width):
        return torch.empty(B, T, HV, width, dtype=q.dtype, device=q.device)

    out = {"Aqk": empty(CHUNK), "w": empty(K), "u": empty(V), "qg": empty(K), "kg": empty(K)}
    kda_intra_fused[(B * NT * HV,)](
        q, k, v, g2, beta, **out, scale=scale, T=T, NT=NT, H=H, HV=HV, K=K, V=V, BOUNDED=bounded, **config(K, V, bounded, arch))
    return out


def config(K: int, V: int, bounded: bool, arch: str) -> dict:
    """The configuration, by measurement on an H200 and by what ptxas spills (NOTES.md): 168 registers let three CTAs share an
    SM, where they are enough, which is at K = V = 128 on Hopper."""
    capped = {"maxnreg": 168} if arch == "sm_90a" and K == V == 128 else {}
    return {"BK": 32, "BKD": 32 if bounded else 16, "BV": 128 if V % 128 == 0 else 64, "num_warps": 4, "num_stages": 1, **capped}
