"""What the preparation kernel must produce, in fp64 and straight from the definition (kernels/kda/ALGORITHM.md)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kernels.kda.contract import CHUNK
from kernels.kda.oracle import pairwise_decay, prepare

OUTPUTS = ("qg", "kg", "w", "u", "Aqk", "gl")


def reference(call: dict) -> dict[str, torch.Tensor]:
    """qg, kg, w [B,T,HV,K], u [B,T,HV,V], Aqk [B,T,HV,64], gl [B,NT,HV,K] of a contract call, all fp64."""
    x = prepare(**call)
    B, T, HV, K = x.q.shape
    pad = -T % CHUNK

    def chunks(t):  # [B,T,HV,...] -> [B,HV,NT,64,...], zeros past T: no decay, no key
        t = F.pad(t.movedim(1, -1), (0, pad)).movedim(-1, 1)
        return t.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    def rows(t):  # back
        return t.movedim(1, 3).flatten(1, 2)[:, :T]

    q, k, v, g, beta = (chunks(t) for t in (x.q, x.k, x.v, x.g, x.beta))
    G = g.cumsum(3)
    out = {name: [] for name in ("w", "u", "Aqk")}
    for n in range(G.shape[2]):  # one chunk at a time: the pairwise decays are large
        decay = pairwise_decay(G[:, :, n]) * k[:, :, n, None]
        Aqk = x.scale * torch.einsum("bhik,bhijk->bhij", q[:, :, n], decay)
        L = torch.einsum("bhik,bhijk->bhij", beta[:, :, n, :, None] * k[:, :, n], decay).tril(-1)
        eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device)
        right = torch.cat([k[:, :, n] * G[:, :, n].exp(), v[:, :, n]], -1) * beta[:, :, n, :, None]
        wu = torch.linalg.solve_triangular(eye + L, right, upper=False, unitriangular=True)
        for name, t in (("w", wu[..., :K]), ("u", wu[..., K:]), ("Aqk", Aqk)):
            out[name].append(t)
    last = G[:, :, :, -1:]
    out = {n: rows(torch.stack(t, 2)) for n, t in out.items()}
    return {"qg": rows(q * G.exp()), "kg": rows(k * (last - G).exp()), **out,
            "gl": last[:, :, :, 0].movedim(1, 2) / math.log(2)}  # fmt: skip


def empty_outputs(call: dict, fill: float = float("nan")) -> dict[str, torch.Tensor]:
    """Fresh outputs of the kernel, all `fill`."""
    B, T, _, K = call["q"].shape
    HV, V = call["v"].shape[2:]
    widths = {"qg": K, "kg": K, "w": K, "u": V, "Aqk": CHUNK}
    shapes = {n: (B, T, HV, width) for n, width in widths.items()}
    out = {n: torch.full(s, fill, dtype=call["q"].dtype, device=call["q"].device) for n, s in shapes.items()}
    return {**out, "gl": torch.full((B, -(-T // CHUNK), HV, K), fill, device=call["q"].device)}


def arguments(call: dict, out: dict[str, torch.Tensor]) -> tuple:
    """Positional arguments of the compiled kernel."""
    tensors = [call.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    scale = call.get("scale") or call["q"].shape[-1] ** -0.5
    return (*tensors, *(out[n] for n in OUTPUTS), scale, call.get("lower_bound") or -5.0)
