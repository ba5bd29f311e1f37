"""The intra stage in fp64, from its definition (ALGORITHM.md (6) to (12)), and inputs for it."""

from __future__ import annotations

import math

import torch

C = 64
TOKEN_NAMES = ("Aqk", "w", "u", "qg", "kg")


def reference(q, k, v, g2, beta, scale):
    """Aqk, w, u, qg, kg in fp64 for the stage's arguments; per pair decays, triangular solve."""
    q, k, v, G, beta = (x.double() for x in (q, k, v, g2, beta))
    B, T, H, K = q.shape
    HV = v.shape[2]
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    out = {name: [] for name in TOKEN_NAMES}
    for t in range(0, T, C):
        Q, X, V, D, b = (x[:, t:t + C].transpose(1, 2) for x in (q, k, v, G, beta))       # [B,HV,n,*]
        n = D.shape[2]
        r = (D[..., :, None, :] - D[..., None, :, :]).clamp(max=0).exp2()
        Aqk = scale * torch.einsum("bhic,bhjc,bhijc->bhij", Q, X, r).tril()
        L = torch.einsum("bhic,bhjc,bhijc->bhij", X, X, r).tril(-1) * b[..., None]
        A = torch.linalg.solve_triangular(L + torch.eye(n).double(), torch.eye(n).double(), upper=False)
        chunk = dict(Aqk=torch.nn.functional.pad(Aqk, (0, C - n)), w=A @ (b[..., None] * X * D.exp2()),
                     u=A @ (b[..., None] * V), qg=Q * D.exp2(), kg=X * (D[..., -1:, :] - D).exp2())
        for name, x in chunk.items():
            out[name].append(x.transpose(1, 2))
    return {name: torch.cat(x, 1) for name, x in out.items()}


def cumsum(g):
    """Natural-log decay [B,T,HV,K] -> g2: inclusive cumsum inside each chunk, log2 units."""
    return torch.cat([x.cumsum(1) for x in (g / math.log(2)).split(C, dim=1)], 1)


def arguments(B, T, H, HV, K, V, io, regime, seed=0):
    """Seeded stage arguments. Regimes: strong, slow; `deep` has decays of up to 2^-86 a token beside channels with
    none; `equal` identical keys, no decay, beta = 1 (where powers of L cancel)."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    v, beta, raw = normal(B, T, HV, V), normal(B, T, HV).sigmoid(), normal(B, T, HV, K)
    if regime == "deep":
        g = -60 * torch.rand(B, T, HV, K, generator=gen) * (raw > 0)
    elif regime == "equal":
        g, beta, k = torch.zeros_like(raw), torch.ones_like(beta), k[:, :1].expand(B, T, H, K)
    else:
        g = -5 * torch.sigmoid(raw - (8 if regime == "slow" else 0))
    return q.to(io), k.to(io).contiguous(), v.to(io), cumsum(g), beta, K**-0.5


def row_error(x, exact):
    """Largest row error (L2) over the tensor's mean row norm; nan if anything is not finite."""
    error = (x.double() - exact).flatten(0, -2).norm(dim=-1).max()
    return (error / exact.flatten(0, -2).norm(dim=-1).square().mean().sqrt()).item()
