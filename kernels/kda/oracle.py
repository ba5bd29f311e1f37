"""The exact answer: KDA in fp64, straight from the recurrence, and a chunked fp64 form for long sequences.

`recurrent` is the definition (Kimi Linear, arXiv 2510.26692, the KDA recurrence); `chunked` computes the same in
blocks of 16 tokens, from exponentials of differences only, and agrees with it to 1e-10. Both take the contract's
arguments, whatever the form: `prepare` turns them into normalised q, k, natural-log decays and betas in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

L2_EPS = 1e-6
BLOCK = 16
SPAN = 256  # tokens prepared at a time: wide operands of a long sequence take several times the memory of the call
PER_TOKEN = ("q", "k", "v", "g", "beta")
NO_DECAY_BELOW = -746.0  # nats: exp is 0 in fp64 from here on, so that a floor changes no decay but keeps sums finite


@dataclass(frozen=True)
class Operands:
    """The recurrence's operands in one dtype: q, k [B,T,HV,K] (heads already repeated), v [B,T,HV,V], g [B,T,HV,K]
    natural-log decay, beta [B,T,HV], state [B,HV,K,V], and the scale of q."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    scale: float


def log_decay(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None, lower_bound: float | None) -> torch.Tensor:
    """Natural-log decay [B,T,HV,K] from the raw gate, in g's dtype: the safe gate if lower_bound is given, else softplus."""
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype).view(g.shape[2], g.shape[3])
    a = A_log.to(g.dtype).exp()[:, None]
    return -a * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(a * g)


def prepare(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False, lower_bound=None, A_log=None,
    dt_bias=None, *, dtype: torch.dtype = torch.float64,
) -> Operands:  # fmt: skip
    """The operands of a contract call, in `dtype`: gate, normalisation and sigmoid applied as the flags say."""
    B, _, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound if safe_gate else None)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    state = torch.zeros(B, HV, K, V, dtype=dtype, device=q.device) if initial_state is None else initial_state.to(dtype)
    return Operands(q, k, v, g, beta, state, K**-0.5 if scale is None else scale)


def blocks(call: dict, size: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[slice, Operands]]:
    """The tokens in blocks of `size` (a divisor of SPAN) with their operands, one after the other; the state is always
    the initial one."""
    for first in range(0, call["q"].shape[1], SPAN):
        x = prepare(**call | {name: call[name][:, first : first + SPAN] for name in PER_TOKEN}, dtype=dtype)
        for start in range(0, x.q.shape[1], size):
            block = {name: getattr(x, name)[:, start : start + size] for name in PER_TOKEN}
            yield slice(first + start, first + start + size), replace(x, **block)


def recurrent(**call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B,T,HV,V], final state [B,HV,K,V]) in fp64, token by token: S = diag(exp g) S; S += beta k (v - k^T S)^T;
    o = scale * q^T S."""
    x = prepare(**call)
    S, o = x.state.clone(), torch.empty_like(x.v)
    for t in range(x.q.shape[1]):
        S = x.g[:, t].exp()[..., None] * S
        error = x.v[:, t] - torch.einsum("bhk,bhkv->bhv", x.k[:, t], S)
        S = S + (x.beta[:, t, :, None] * x.k[:, t])[..., None] * error[..., None, :]
        o[:, t] = x.scale * torch.einsum("bhk,bhkv->bhv", x.q[:, t], S)
    return o, S


def chunked(**call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `recurrent`, in blocks of 16 tokens (ALGORITHM.md): pairwise decays exp(g_i - g_j) are exponentials
    of non-positive differences, so that no decay is too strong for them."""
    o = torch.empty(call["v"].shape, dtype=torch.float64, device=call["v"].device)
    for tokens, x in blocks(call, BLOCK):
        S = S if tokens.start else x.state
        q, k, v, g, beta = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.g, x.beta))  # [B,HV,C,...]
        G = g.clamp_min(NO_DECAY_BELOW).cumsum(2)
        decay = pairwise_decay(G)
        Akk = torch.einsum("bhik,bhijk,bhjk->bhij", beta[..., None] * k, decay, k).tril(-1)
        Aqk = torch.einsum("bhik,bhijk,bhjk->bhij", q, decay, k)
        eye = torch.eye(G.shape[2], dtype=G.dtype, device=G.device)
        corrected = beta[..., None] * (v - (k * G.exp()) @ S)
        v_new = torch.linalg.solve_triangular(eye + Akk, corrected, upper=False, unitriangular=True)
        o[:, tokens] = (x.scale * ((q * G.exp()) @ S + Aqk @ v_new)).transpose(1, 2)
        S = G[:, :, -1].exp()[..., None] * S + (k * (G[:, :, -1:] - G).exp()).transpose(-1, -2) @ v_new
    return o, S


def pairwise_decay(G: torch.Tensor) -> torch.Tensor:
    """exp(G_i - G_j) [..., C, C, K] for i >= j and 0 above the diagonal, from cumulated natural-log decays G [..., C, K]."""
    earlier = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).triu(1)[..., None]
    difference = G[..., :, None, :] - G[..., None, :, :]
    return difference.masked_fill_(earlier, -torch.inf).exp_()  # in place: it is the largest tensor by far
