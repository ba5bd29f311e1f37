"""Seeded inputs: four gate regimes, two forms.

Regimes (natural-log decay per token): `strong` (raw ~ N(0,1), safe gate with lower bound -5: about -2.5, nothing
survives 30 tokens), `slow` (raw ~ N(-8,1): about -0.002, memory of hundreds of tokens), `mixed` (each head and channel
from one or the other), `init` (softplus gate as fla's KDA layer initialises it: A ~ U(1,16), softplus(dt_bias)
log-uniform in 0.001..0.1, raw ~ N(0,0.02): median about -0.07). Beta logits ~ N(0,1).

Forms: `prod` (raw bf16 gate, beta logits, unnormalised q and k: everything inside the call) and `pre` (fp32 log
gate, sigmoid-ed beta, normalised q and k). Nothing is ever compared across forms.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.kda.cases import Case
from kernels.kda.oracle import log_decay

REGIMES = ("strong", "slow", "mixed", "init")
FORMS = ("prod", "pre")
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Inputs:
    """One drawn problem: the tensors and flags of a contract call, and what they were drawn from (to replay it)."""

    case: Case
    regime: str
    form: str
    seed: int
    tensors: dict[str, torch.Tensor]
    flags: dict[str, Any]

    def call(self) -> dict[str, Any]:
        """Keyword arguments for `chunk_kda` and for the oracle."""
        return {**self.tensors, **self.flags}

    def clone(self) -> Inputs:
        """The same values in fresh memory."""
        return replace(self, tensors={name: t.clone() for name, t in self.tensors.items()})


def fresh_seed() -> int:
    """A seed nobody chose; print it, so that a failure can be replayed."""
    return secrets.randbits(31)


def make(case: Case, regime: str, form: str, seed: int | None = None, device: torch.device | str = "cpu") -> Inputs:
    """Draw (case, regime, form) from `seed` (fresh by default). The same seed gives the same values on one device type.

    Raises ValueError for an unknown regime or form.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime: given {regime!r}, accepted: {', '.join(REGIMES)}")
    if form not in FORMS:
        raise ValueError(f"form: given {form!r}, accepted: {', '.join(FORMS)}")
    seed = fresh_seed() if seed is None else seed
    gen = torch.Generator(device=device).manual_seed(seed)
    B, T, H, HV, K, V, io = case.B, case.T, case.H, case.HV, case.K, case.V, case.torch_dtype

    def normal(*shape: int, dtype: torch.dtype = io) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=device, dtype=dtype)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=gen, device=device, dtype=torch.float32)

    tensors = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    raw = normal(B, T, HV, K, dtype=torch.float32)
    if regime == "init":
        dt = torch.exp(uniform(-6.907755, -2.302585, HV * K))
        A_log, dt_bias = uniform(1.0, 16.0, HV).log(), dt + torch.log(-torch.expm1(-dt))
        raw *= 0.02
    else:
        A_log, dt_bias = uniform(0.0, 0.2, HV), uniform(0.0, 0.2, HV * K)
        slow = {"strong": 0.0, "slow": 1.0}.get(regime)
        raw -= 8.0 * (uniform(0, 1, HV, K).round() if slow is None else slow)
    tensors |= {"g": raw.to(io), "beta": normal(B, T, HV), "A_log": A_log, "dt_bias": dt_bias}
    if case.initial_state:
        tensors["initial_state"] = normal(B, HV, K, V, dtype=torch.float32) * 0.5
    bounded = regime != "init"
    flags = {
        "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "safe_gate": bounded, "lower_bound": LOWER_BOUND if bounded else None,
    }  # fmt: skip
    inputs = Inputs(case, regime, form, seed, tensors, flags)
    return inputs if form == "prod" else _precomputed(inputs)


def _precomputed(prod: Inputs) -> Inputs:
    """Form `pre` of drawn `prod` inputs: gate, normalisation and sigmoid done outside, in fp32."""
    t, io = dict(prod.tensors), prod.tensors["q"].dtype
    for name in ("q", "k"):
        t[name] = torch.nn.functional.normalize(t[name].float(), dim=-1).to(io)
    t["g"] = log_decay(t["g"].float(), t.pop("A_log"), t.pop("dt_bias"), prod.flags["lower_bound"])
    t["beta"] = torch.sigmoid(t["beta"].float())
    flags = {"output_final_state": True, "safe_gate": prod.flags["safe_gate"]}
    return replace(prod, form="pre", tensors=t, flags=flags)
