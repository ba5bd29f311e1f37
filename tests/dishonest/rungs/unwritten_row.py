"""Never writes the last token: what memory holds is often zero, an earlier answer, or NaN, and a lax test accepts all three."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

import torch


def chunk_kda(**call):
    right, state = honest(**call)
    o = torch.empty_like(right)
    o[:, :-1] = right[:, :-1]
    return o, state
