"""The honest rung that the others cheat with: plain torch, chunk by chunk in fp32, on any device."""

import torch

from kernels.kda.contract import CHUNK, Stage, kda_op
from kernels.kda.oracle import pairwise_decay, prepare

UNITS = ()


def unsupported(p):
    return None


def state_and_output(p, x):
    io = p.io_dtype
    operands = prepare(
        x["q"], x["k"], x["v"], x["g"], x["beta"], p.scale, x["initial_state"], use_qk_l2norm_in_kernel=p.l2norm,
        use_gate_in_kernel=p.gate != "log", use_beta_sigmoid_in_kernel=p.beta_sigmoid, safe_gate=p.gate == "safe",
        lower_bound=p.lower_bound, A_log=x["A_log"], dt_bias=x["dt_bias"], dtype=torch.float32)
    S = operands.state.clone()
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=io, device=x["q"].device)
    for start in range(0, p.T, CHUNK):
        rows = slice(start, start + CHUNK)
        q, k, v, g, beta = (t[:, rows].transpose(1, 2) for t in
                            (operands.q, operands.k, operands.v, operands.g, operands.beta))
        G = g.clamp_min(-104.0).cumsum(2)  # exp is 0 in fp32 from there on; sums of -inf would give NaN
        decay = pairwise_decay(G)
        Akk = torch.einsum("bhik,bhijk,bhjk->bhij", beta[..., None] * k, decay, k).tril(-1)
        Aqk = torch.einsum("bhik,bhijk,bhjk->bhij", q, decay, k)
        eye = torch.eye(G.shape[2], device=G.device)
        corrected = beta[..., None] * (v - (k * G.exp()) @ S)
        v_new = torch.linalg.solve_triangular(eye + Akk, corrected, upper=False, unitriangular=True)
        out = p.scale * ((q * G.exp()) @ S + Aqk @ v_new)
        o[:, rows] = out.transpose(1, 2).to(io)
        S = G[:, :, -1].exp()[..., None] * S + (k * (G[:, :, -1:] - G).exp()).transpose(-1, -2) @ v_new
    return {"o": o, "final_state": S}


STAGES = (Stage("state", (), state_and_output),)

chunk_kda = kda_op(STAGES, unsupported)
