"""The error budget, derived and not chosen.

`low_precision` is a plain chunked torch version that rounds where a bf16 (or fp16) tensor-core kernel must round. A
kernel may err, in its worst row, by at most 2 x (that version's worst row error against fp64 + one ulp of the output
type). Whole-tensor means hide a wrong row, so nothing here averages over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kda.contract import CHUNK
from kernels.kda.oracle import blocks, pairwise_decay

VOID_ABOVE = 2e-2  # a reference worse than this cannot judge anybody
NO_DECAY_BELOW = -104.0  # nats: exp is 0 in fp32 from here on, so that a floor changes no decay but keeps sums finite


@dataclass(frozen=True)
class Verdict:
    """How one tensor fared. error, budget: worst row error relative to the row scale (`row_errors`); where: index of the
    worst row. void: why the case cannot judge (then passed is False). reason: one line, empty when passed."""

    tensor: str
    error: float
    budget: float
    where: tuple[int, ...]
    passed: bool
    void: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reference:
    """The exact answer in fp64 and the budgets that the low-precision version earns against it."""

    o: torch.Tensor
    state: torch.Tensor
    budgets: dict[str, float]
    void: str | None


def row_errors(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """L2 error of each row (last dimension) over that row's scale: the larger of its own norm and the tensor's RMS row
    norm. The RMS keeps rows that are nearly zero from dominating; the own norm keeps the few rows that are several
    times larger (strong gates: o is q_t . k_t times one value) from being charged for their size, which would inflate
    the budget of all others."""
    norms = torch.linalg.vector_norm(exact, dim=-1)
    scale = torch.maximum(norms, norms.square().mean().sqrt()).clamp_min(torch.finfo(torch.float64).tiny)
    errors = [torch.linalg.vector_norm(a - b, dim=-1) for a, b in zip(x, exact)]  # the whole difference would be as large as exact
    return torch.stack(errors) / scale


def low_precision(**call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final state): chunks of 64, operands of every product in the type of q, sums, gates and inverse in fp32."""
    io = call["q"].dtype

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.to(io).float()

    o = torch.empty_like(call["v"], memory_format=torch.contiguous_format)
    for chunk, x in blocks(call, CHUNK, torch.float32):
        S = S if chunk.start else x.state
        q, k, v, g, beta = (t.transpose(1, 2) for t in
                            (rounded(x.q), rounded(x.k), x.v, x.g.clamp_min(NO_DECAY_BELOW), x.beta))
        G = g.cumsum(2)
        decayed_k = pairwise_decay(G).mul_(k[:, :, None])
        Aqk = rounded(x.scale * torch.einsum("bhik,bhijk->bhij", q, decayed_k))
        Akk = torch.einsum("bhik,bhijk->bhij", beta[..., None] * k, decayed_k).tril(-1)
        eye = torch.eye(G.shape[2], device=G.device)
        inverse = rounded(torch.linalg.solve_triangular(eye + Akk, eye.expand_as(Akk), upper=False, unitriangular=True))
        w, u = (rounded(inverse @ rounded(beta[..., None] * t)) for t in (k * G.exp(), v))
        h = rounded(S)
        v_new = rounded(u - w @ h)
        o[:, chunk] = (x.scale * (rounded(q * G.exp()) @ h) + Aqk @ v_new).transpose(1, 2)
        S = G[:, :, -1].exp()[..., None] * S + rounded(k * (G[:, :, -1:] - G).exp()).transpose(-1, -2) @ v_new
    return o, S


def reference(exact: tuple[torch.Tensor, torch.Tensor], void_above: float = VOID_ABOVE, **call) -> Reference:
    """What `judge` compares with: the exact answer (from the oracle, for this call) and its budgets."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        low = low_precision(**call)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    budgets, void = {}, None
    for name, x, ref in zip(("o", "final_state"), low, exact):
        error = row_errors(x, ref).max().item()
        if not error < void_above:
            void = f"the low-precision reference errs by {error:.2e} in {name} (at most {void_above:g} can judge)"
        budgets[name] = 2 * (error + torch.finfo(x.dtype).eps)
    return Reference(*exact, budgets, void)


def judge(o: torch.Tensor, state: torch.Tensor | None, ref: Reference) -> list[Verdict]:
    """One verdict per tensor; state may be None when it was not asked for. NaN or Inf anywhere fails."""
    return [_judge(name, x, exact, ref) for name, x, exact in
            (("o", o, ref.o), ("final_state", state, ref.state)) if x is not None]  # fmt: skip


def _judge(name: str, x: torch.Tensor, exact: torch.Tensor, ref: Reference) -> Verdict:
    budget = ref.budgets[name]
    if x.shape != exact.shape:
        return Verdict(name, float("inf"), budget, (), False, reason=f"{name}: shape {tuple(x.shape)}, expected {tuple(exact.shape)}")
    errors = row_errors(x, exact)
    bad = ~torch.isfinite(x).all(-1)
    errors = errors.masked_fill(bad, float("inf"))
    where = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    worst = errors[where].item()
    axes = ("batch", "token", "head") if name == "o" else ("batch", "head", "k")
    place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, where))
    if bad.any():
        return Verdict(name, worst, budget, where, False, ref.void, f"{name}: NaN or Inf in {int(bad.sum())} of {bad.numel()} rows, first at {place}")
    if ref.void:
        return Verdict(name, worst, budget, where, False, ref.void, f"void: {ref.void}")
    if worst > budget:
        over = int((errors > budget).sum())
        return Verdict(name, worst, budget, where, False, reason=(
            f"{name}: row error {worst:.2e} at {place} exceeds the budget {budget:.2e} ({over} of {errors.numel()} rows do)"))
    return Verdict(name, worst, budget, where, True)
