"""What the state kernel computes for one head and one V tile, for the equality prover.

SentryWard captures `reference` through torch.export, so it is plain torch on whole tensors. Products and sums are
taken in real arithmetic: rounding (h and v' as operands, o) is invisible to the proof.
"""

import torch

CHUNK = 64


def reference(qg, w, kg, u, aqk, g2, h0, scale):
    """o [T, V] and ht [K, V] of one head: qg, w, kg [T, K], u [T, V], aqk [T, 64], g2 [T, K] in log2 units, h0 [K, V],
    T a multiple of 64."""
    h, o = h0, []
    for start in range(0, qg.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        v = u[rows].float() - torch.matmul(w[rows].float(), h)
        o.append(scale * torch.matmul(qg[rows].float(), h) + torch.matmul(aqk[rows].float(), v))
        h = torch.exp2(g2[start + CHUNK - 1]).unsqueeze(1) * h + torch.matmul(kg[rows].float().transpose(0, 1), v)
    return torch.cat(o, 0).to(torch.bfloat16), h
