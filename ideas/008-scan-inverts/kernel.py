"""Rung 008: the whole forward in one kernel.

It reads q, k, v, gate and beta once and writes o and the final state: nothing else passes through global memory.
Equations: kernels/kda/ALGORITHM.md; roles, phases and barriers: forward.py, kda_sm90.py.

| stage   | kernels     | leaves                     |
|---------|-------------|----------------------------|
| forward | kda_forward | o [B,T,HV,V], final_state  |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import Problem, Stage, dense, kda_op

SOURCES = {"sm_90a": "kda_sm90.py"}
CALLS = CallCache()


def unit(arch: str, **params) -> Unit:
    return Unit("kda_forward", Path(__file__).parent / SOURCES[arch], arch, tuple(params.items()))


def unit_params(K: int, V: int, dtype: str, gate: str, bounded: bool, raw: bool, has_h0: bool) -> dict:
    """The parameters of form `prod` (raw) or `pre`."""
    other = dtype if raw else "float32"
    return {"K": K, "V": V, "dtype": dtype, "gate": gate, "bounded": bounded, "l2norm": raw, "beta_sigmoid": raw,
            "g_dtype": other, "beta_dtype": other, "dt_bias": raw, "has_h0": has_h0, "v_tile": v_tile(V)}  # fmt: skip


def v_tile(V: int) -> int:
    """Columns of V a CTA walks: as many as it can, since every CTA prepares its chunks itself."""
    return 128 if V % 128 == 0 else 64


SIZES = tuple((K, K, dtype) for K in (64, 128) for dtype in ("bfloat16", "float16"))
GATES = (("safe", True), ("log", True), ("softplus", False), ("log", False))
UNITS = tuple(
    partial(unit, **unit_params(K, V, dtype, gate, bounded, gate != "log", has_h0))
    for sizes, gates in ((SIZES, GATES), (((128, 256, "bfloat16"),), GATES[:2]))
    for K, V, dtype in sizes for gate, bounded in gates for has_h0 in (False, True)
)  # fmt: skip


def unsupported(p: Problem) -> str | None:
    """What the kernel is not written for."""
    if p.K not in (64, 128):
        return f"q: given K = {p.K}, accepted: 64 or 128"
    if p.V % 64:
        return f"v: given V = {p.V}, accepted: a multiple of 64"
    for name in ("g", "beta"):
        if p.dtypes[name] not in (p.io_dtype, torch.float32):
            return f"{name}: given dtype {p.dtypes[name]}, accepted: that of q, {p.io_dtype}, or torch.float32"
    return None


def forward(p: Problem, x: dict) -> dict:
    operands = dense(p, x, "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    where = target.current()
    plan = CALLS.plan((p, where), partial(plan_forward, where, p))
    o, final_state = plan.allocate(x["q"])
    plan.run(*operands, o, final_state, *plan.scalars)
    return {"o": o, "final_state": final_state}


def plan_forward(where: target.Target, p: Problem) -> Plan:
    def name(tensor: str) -> str:
        return str(p.dtypes[tensor]).removeprefix("torch.")

    params = {"K": p.K, "V": p.V, "dtype": name("q"), "gate": p.gate, "bounded": p.safe_gate, "l2norm": p.l2norm,
              "beta_sigmoid": p.beta_sigmoid, "g_dtype": name("g"), "beta_dtype": name("beta"),
              "dt_bias": "dt_bias" in p.dtypes, "has_h0": p.initial_state, "v_tile": v_tile(p.V)}  # fmt: skip
    run = where.load(unit(where.arch, **params))
    outputs = Spec((p.B, p.T, p.HV, p.V), p.io_dtype), Spec((p.B, p.HV, p.K, p.V), torch.float32)
    return Plan(run, outputs, (p.scale, p.lower_bound or 0.0))


STAGES = (Stage("forward", ("kda_forward",), forward),)

chunk_kda = kda_op(STAGES, unsupported)
