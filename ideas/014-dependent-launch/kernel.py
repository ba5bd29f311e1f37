"""Rung 014: rung 007's two kernels, the second launched beside the first, for whose end it waits on the device.

A segment's CTA first finds out how far back it must walk for its incoming state: until a bound says that of what came
before nothing is left in fp32, at most to the start of the sequence, updating the state only. The bound is one float a
chunk, from prep (fade.py); how many chunks a segment has depends on the shape alone (`segment_length`).

| stage | kernels   | leaves                                                                                     |
|-------|-----------|--------------------------------------------------------------------------------------------|
| prep  | kda_prep  | qg, kg, w [B,T,HV,K], u [B,T,HV,V], Aqk [B,T,HV,64], gl [B,NT,HV,K] fp32, fade [B,NT,HV]    |
| state | kda_state | o [B,T,HV,V], final_state                                                                  |

With one segment (many heads) there is no fade and no walk: 005's kernels.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import CHUNK, Problem, Stage, dense, kda_op

HERE = Path(__file__).parent
STATE = {"sm_90a": "state_sm90.py"}
CALLS = CallCache()
V_TILE = 64  # V columns a CTA of the state kernel walks
EMULATED_SMS = 132  # as many as an H200 has


def state_unit(arch: str, **params) -> Unit:
    return Unit("kda_state", HERE / STATE[arch], arch, tuple(params.items()))


def prep_unit(arch: str, **params) -> Unit:
    return Unit("kda_prep", HERE / "prep.py", arch, tuple(params.items()))


def prep_params(K: int, V: int, dtype: str, gate: str, bounded: bool, raw: bool, fades: bool) -> dict:
    """The parameters of form `prod` (raw) or `pre`."""
    other = dtype if raw else "float32"
    return {"K": K, "V": V, "dtype": dtype, "gate": gate, "bounded": bounded, "l2norm": raw, "beta_sigmoid": raw,
            "g_dtype": other, "beta_dtype": other, "dt_bias": raw, "fades": fades}  # fmt: skip


SIZES = tuple((K, K, dtype) for K in (64, 128) for dtype in ("bfloat16", "float16"))
GATES = (("safe", True), ("log", True), ("softplus", False), ("log", False))
UNITS = tuple(
    partial(prep_unit, **prep_params(K, V, dtype, gate, bounded, gate != "log", fades))
    for sizes, gates in ((SIZES, GATES), (((128, 256, "bfloat16"),), GATES[:2]))
    for K, V, dtype in sizes for gate, bounded in gates for fades in (False, True)
) + tuple(
    partial(state_unit, K=K, V=V, dtype=dtype, segmented=segmented, has_h0=has_h0)
    for K, V in ((64, 64), (128, 128), (128, 256)) for dtype in ("bfloat16", "float16")
    for segmented in (False, True) for has_h0 in (False, True)
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


def segment_length(p: Problem) -> int:
    """Chunks a segment: as many segments as CTAs still fit the GPU at once, if a segment has few of them.

    Above 2/5 of the SMs one segment: the CTAs then draw what L2 can give already (NOTES.md, Prediction)."""
    tiles, sms = p.B * p.HV * (p.V // V_TILE), multiprocessors(p.device)
    return -(-p.NT // (sms // tiles)) if 5 * tiles <= 2 * sms else p.NT


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def prep(p: Problem, x: dict) -> dict:
    """Everything up to the state scan, in one kernel."""
    operands = dense(p, x, "q", "k", "v", "g", "beta", "A_log", "dt_bias")
    where = target.current()
    plan = CALLS.plan((p, where, "prep"), partial(plan_prep, where, p))
    qg, kg, w, u, Aqk, gl, *fade = plan.allocate(x["q"])
    fade = fade[0] if fade else None
    plan.run(*operands, qg, kg, w, u, Aqk, gl, fade, *plan.scalars)
    return {"qg": qg, "kg": kg, "w": w, "u": u, "Aqk": Aqk, "gl": gl, "fade": fade}


def plan_prep(where: target.Target, p: Problem) -> Plan:
    fades = segment_length(p) < p.NT

    def name(tensor: str) -> str:
        return str(p.dtypes[tensor]).removeprefix("torch.")

    params = {"K": p.K, "V": p.V, "dtype": name("q"), "gate": p.gate, "bounded": p.safe_gate, "l2norm": p.l2norm,
              "beta_sigmoid": p.beta_sigmoid, "g_dtype": name("g"), "beta_dtype": name("beta"),
              "dt_bias": "dt_bias" in p.dtypes, "fades": fades}  # fmt: skip
    run = where.load(prep_unit(where.arch, **params))
    keys, values, scores = (Spec((p.B, p.T, p.HV, n), p.io_dtype) for n in (p.K, p.V, CHUNK))
    bound = (Spec((p.B, p.NT, p.HV), torch.float32),) if fades else ()
    outputs = keys, keys, keys, values, scores, Spec((p.B, p.NT, p.HV, p.K), torch.float32), *bound
    return Plan(run, outputs, (p.scale, p.lower_bound or 0.0))


def state(p: Problem, x: dict) -> dict:
    """Scan and output in one kernel, a grid of tiles by segments."""
    operands = (x["qg"], x["w"], x["kg"], x["u"], x["Aqk"], x["gl"], x["fade"], *dense(p, x, "initial_state"))
    where = target.current()
    plan = CALLS.plan((p, where, "state"), partial(plan_state, where, p))
    o, final_state = plan.allocate(x["u"])
    plan.run(*operands, o, final_state, *plan.scalars)
    return {"o": o, "final_state": final_state}


def plan_state(where: target.Target, p: Problem) -> Plan:
    length = segment_length(p)
    params = {"K": p.K, "V": p.V, "dtype": str(p.io_dtype).removeprefix("torch."),
              "segmented": length < p.NT, "has_h0": p.initial_state}  # fmt: skip
    run = where.load(state_unit(where.arch, **params))
    outputs = Spec((p.B, p.T, p.HV, p.V), p.io_dtype), Spec((p.B, p.HV, p.K, p.V), torch.float32)
    return Plan(run, outputs, (p.scale, length))


STAGES = (Stage("prep", ("kda_prep",), prep), Stage("state", ("kda_state",), state))

chunk_kda = kda_op(STAGES, unsupported)
