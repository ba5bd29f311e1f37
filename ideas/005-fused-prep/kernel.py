"""Rung 005: one kernel prepares the chunks, from the raw inputs.

It reads q, k, v, gate and beta once and writes what the state kernel reads, once, in the io dtype; the chunk's decay
goes over as one fp32 row per chunk. Equations: kernels/kda/ALGORITHM.md; phases: prep.py.

| stage | kernels   | leaves                                                                     |
|-------|-----------|----------------------------------------------------------------------------|
| prep  | kda_prep  | qg, kg, w [B,T,HV,K], u [B,T,HV,V], Aqk [B,T,HV,64], gl [B,NT,HV,K] fp32   |
| state | kda_state | o [B,T,HV,V], final_state                                                  |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import CHUNK, Problem, Stage, dense, kda_op

HERE = Path(__file__).parent
STATE = {"sm_90a": "state_sm90.py", "sm_100a": "state_sm100.py", "sm_103a": "state_sm100.py"}
CALLS = CallCache()


def state_unit(arch: str, K: int, V: int, dtype: str, has_h0: bool) -> Unit:
    return Unit("kda_state", HERE / STATE[arch], arch, (("K", K), ("V", V), ("dtype", dtype), ("has_h0", has_h0)))


def prep_unit(arch: str, **params) -> Unit:
    return Unit("kda_prep", HERE / "prep.py", arch, tuple(params.items()))


def prep_params(K: int, V: int, dtype: str, gate: str, bounded: bool, raw: bool) -> dict:
    """The parameters of form `prod` (raw) or `pre`."""
    other = dtype if raw else "float32"
    return {"K": K, "V": V, "dtype": dtype, "gate": gate, "bounded": bounded, "l2norm": raw, "beta_sigmoid": raw,
            "g_dtype": other, "beta_dtype": other, "dt_bias": raw}  # fmt: skip


SIZES = tuple((K, K, dtype) for K in (64, 128) for dtype in ("bfloat16", "float16"))
GATES = (("safe", True), ("log", True), ("softplus", False), ("log", False))
UNITS = tuple(
    partial(prep_unit, **prep_params(K, V, dtype, gate, bounded, gate != "log"))
    for sizes, gates in ((SIZES, GATES), (((128, 256, "bfloat16"),), GATES[:2]))
    for K, V, dtype in sizes for gate, bounded in gates
) + tuple(
    partial(state_unit, K=K, V=V, dtype=dtype, has_h0=has_h0)
    for K, V in ((64, 64), (128, 128), (128, 256)) for dtype in ("bfloat16", "float16") for has_h0 in (False, True)
)  # fmt: skip


def unsupported(p: Problem) -> str | None:
    """What the two kernels are not written for."""
    if p.K not in (64, 128):
        return f"q: given K = {p.K}, accepted: 64 or 128"
    if p.V % 64:
        return f"v: given V = {p.V}, accepted: a multiple of 64"
    for name in ("g", "beta"):
        if p.dtypes[name] not in (p.io_dtype, torch.float32):
            return f"{name}: given dtype {p.dtypes[name]}, accepted: that of q, {p.io_dtype}, or torch.float32"
    for name, size in (("q: given B", p.B), ("q: given chunks of 64 tokens, T / 64", p.NT), ("v: given HV", p.HV)):
        if size > 65535:
            return f"{name} = {size}, accepted: at most 65535"
    return None


def prep(p: Problem, x: dict) -> dict:
    """Everything up to the state scan, in one kernel."""
    operands = dense(p, x, "q", "k", "v", "g", "beta", "A_log", "dt_bias")
    where = target.current()
    plan = CALLS.plan((p, where, "prep"), partial(plan_prep, where, p))
    qg, kg, w, u, Aqk, gl = outputs = plan.allocate(x["q"])
    plan.run(*operands, *outputs, *plan.scalars)
    return {"qg": qg, "kg": kg, "w": w, "u": u, "Aqk": Aqk, "gl": gl}


def plan_prep(where: target.Target, p: Problem) -> Plan:
    def name(tensor: str) -> str:
        return str(p.dtypes[tensor]).removeprefix("torch.")

    params = {"K": p.K, "V": p.V, "dtype": name("q"), "gate": p.gate, "bounded": p.safe_gate, "l2norm": p.l2norm,
              "beta_sigmoid": p.beta_sigmoid, "g_dtype": name("g"), "beta_dtype": name("beta"),
              "dt_bias": "dt_bias" in p.dtypes}  # fmt: skip
    run = where.load(prep_unit(where.arch, **params))
    keys, values, scores = (Spec((p.B, p.T, p.HV, n), p.io_dtype) for n in (p.K, p.V, CHUNK))
    outputs = keys, keys, keys, values, scores, Spec((p.B, p.NT, p.HV, p.K), torch.float32)
    return Plan(run, outputs, (p.scale, p.lower_bound or 0.0))


def state(p: Problem, x: dict) -> dict:
    """Scan and output in one kernel."""
    operands = (x["qg"], x["w"], x["kg"], x["u"], x["Aqk"], x["gl"], *dense(p, x, "initial_state"))
    where = target.current()
    plan = CALLS.plan((p, where, "state"), partial(plan_state, where, p))
    o, final_state = plan.allocate(x["u"])
    plan.run(*operands, o, final_state, *plan.scalars)
    return {"o": o, "final_state": final_state}


def plan_state(where: target.Target, p: Problem) -> Plan:
    run = where.load(state_unit(where.arch, p.K, p.V, str(p.io_dtype).removeprefix("torch."), p.initial_state))
    return Plan(run, (Spec((p.B, p.T, p.HV, p.V), p.io_dtype), Spec((p.B, p.HV, p.K, p.V), torch.float32)), (p.scale,))


STAGES = (Stage("prep", ("kda_prep",), prep), Stage("state", ("kda_state",), state))

chunk_kda = kda_op(STAGES, unsupported)
