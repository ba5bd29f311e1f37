"""Segments in plain torch: the recurrence over chunks with a tensor core kernel's roundings (kernels/kda/budget.py),
cut into segments that start from zero as far back as a bound on what came before asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.kda.contract import CHUNK
from kernels.kda.oracle import pairwise_decay, prepare

CLOSED = -286.0  # log2: where the bound is below, the incoming state counts as zero


@dataclass(frozen=True)
class Chunk:
    """What the state pass reads of one chunk, each [B,HV,...]: rounded operands, and the fade in log2 [B,HV]."""

    qg: torch.Tensor
    kg: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    Aqk: torch.Tensor
    gl: torch.Tensor
    fade: torch.Tensor


def per_token(G: torch.Tensor, g: torch.Tensor, k: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """ALGORITHM.md (19), and what a key of norm above 1 or a beta above 2 may grow the state by; log2 units."""
    growth = (beta * k.square().sum(-1) - 1).abs().clamp_min(1)
    return (g.amax(-1) + growth.log()).sum(-1) / math.log(2)


def per_channel(G: torch.Tensor, g: torch.Tensor, k: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The largest channel of the summed gates: no bound, since keys carry one channel's state into another."""
    return G[..., -1, :].amax(-1) / math.log(2)


def chunks(call: dict, fade: Callable = per_token) -> list[Chunk]:
    io = call["q"].dtype
    x = prepare(**call, dtype=torch.float32)

    def rounded(t):
        return t.to(io).float()

    out = []
    for start in range(0, x.q.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        q, k, v, g, beta = (t[:, rows].transpose(1, 2) for t in (rounded(x.q), rounded(x.k), x.v, x.g, x.beta))
        G = g.cumsum(2)
        decayed_k = pairwise_decay(G) * k[:, :, None]
        Aqk = rounded(x.scale * torch.einsum("bhik,bhijk->bhij", q, decayed_k))
        L = torch.einsum("bhik,bhijk->bhij", beta[..., None] * k, decayed_k).tril(-1)
        eye = torch.eye(G.shape[2])
        A = rounded(torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False, unitriangular=True))
        w, u = (rounded(A @ rounded(beta[..., None] * t)) for t in (k * G.exp(), v))
        kg = rounded(k * (G[:, :, -1:] - G).exp())
        out.append(Chunk(rounded(q * G.exp()), kg, w, u, Aqk, G[:, :, -1].exp(), fade(G, g, k, beta)))
    return out


def first_chunk(fades: list[float], begin: int) -> int:
    """Where a segment that begins at chunk `begin` starts its walk: as few chunks back as the bound asks for."""
    total = 0.0
    for c in reversed(range(begin)):
        total += fades[c]
        if total <= CLOSED:
            return c
    return 0


def segmented(call: dict, length: int, fade: Callable = per_token, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final state) with `length` chunks a segment. skip: chunks of every walk left out, as a fault."""
    x, operands = prepare(**call, dtype=torch.float32), chunks(call, fade)
    io, NT = call["q"].dtype, len(operands)
    B, T, HV, V = x.v.shape
    o, final = torch.empty(B, T, HV, V), torch.empty_like(x.state)
    for b in range(B):
        for hv in range(HV):
            fades = [c.fade[b, hv].item() for c in operands]
            for begin in range(0, NT, length):
                start = min(first_chunk(fades, begin) + skip, begin)
                S = x.state[b, hv] if start == 0 else torch.zeros_like(x.state[b, hv])
                for c in range(start, min(begin + length, NT)):
                    n = operands[c]
                    h = S.to(io).float()
                    v_new = (n.u[b, hv] - n.w[b, hv] @ h).to(io).float()
                    if c >= begin:
                        o[b, c * CHUNK : (c + 1) * CHUNK, hv] = x.scale * (n.qg[b, hv] @ h) + n.Aqk[b, hv] @ v_new
                    S = n.gl[b, hv, :, None] * S + n.kg[b, hv].T @ v_new
            final[b, hv] = S
    return o.to(io), final


def hopping_call(T: int, K: int, V: int, seed: int = 0) -> dict:
    """Every channel forgets everything in a chunk, and yet the state lives on: the gates of the lower channels are shut
    in the first 32 tokens of a chunk, those of the upper ones in the last 32, and the last key before each change moves
    half of what it finds to the channels that stay open."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    t, half = torch.arange(T), K // 2
    late = (t % 64 >= 32)[:, None]
    closed = torch.where(late, torch.arange(K) >= half, torch.arange(K) < half)
    g = torch.where(closed, -5.0, -1e-4)
    keys = torch.nn.functional.normalize(normal(half), dim=0)
    hop = torch.cat([keys, keys]) / 2**0.5  # this direction's content goes from one half to the other, at 1/2
    k = torch.zeros(T, K)
    k[t % 32 == 31] = hop
    beta = torch.where(t % 32 == 31, 1.0, 0.0)
    v = torch.zeros(T, V)  # nothing is written but by the initial state
    q = torch.nn.functional.normalize(torch.cat([keys, keys]) + 0.1 * normal(T, K), dim=-1)
    state = torch.cat([torch.zeros(half, V), keys[:, None] * normal(V)])
    return {"q": q[None, :, None].bfloat16(), "k": k[None, :, None].bfloat16(), "v": v[None, :, None].bfloat16(),
            "g": g[None, :, None].float().contiguous(), "beta": beta[None, :, None].float(),
            "initial_state": state[None, None].contiguous(), "safe_gate": True, "output_final_state": True}  # fmt: skip
