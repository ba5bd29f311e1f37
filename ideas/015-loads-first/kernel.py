"""Rung 015: rung 010's kernel, and before it one in which every CTA takes as many chunks, where the gates allow it.

It reads q, k, v, gate and beta once and writes o and the final state. Which of the two kernels works is decided on the device:
the first where the state is known to have faded at every cut between shares, else the second, of which all of rung 010's
notes hold. Equations: kernels/kda/ALGORITHM.md; roles, phases and barriers: forward.py, kda_sm90.py (Hopper),
kda_sm100.py (Blackwell, never timed); who prepares what: shares.py, helpers.py.

| stage   | kernels                                                                         | leaves                    |
|---------|---------------------------------------------------------------------------------|---------------------------|
| forward | where `even` says so kda_forward_cuts, kda_forward by shares; kda_forward by rows | o [B,T,HV,V], final_state |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from _common import target
from _common.cache import CallCache, Plan, Spec
from _common.cute import Unit
from kernels.kda.contract import Problem, Stage, dense, kda_op

SOURCES = {"sm_90a": "kda_sm90.py", "sm_100a": "kda_sm100.py", "sm_103a": "kda_sm100.py"}
CALLS = CallCache()
EMULATED_SMS = 132  # as many as an H200 has
# Idle SMs for a row; columns of V a CTA walks; then chunks that a row prepares itself, those that the helpers prepare next,
# and the chunks before either (NOTES.md).
SHARES = ((3.4, 64, 0, 1, 1), (2.6, 128, 0, 1, 1), (0.9, 128, 1, 2, 2), (0.7, 128, 1, 1, 0), (0.35, 128, 2, 1, 2),
          (0.22, 128, 3, 1, 4), (0.13, 128, 5, 1, 4))  # fmt: skip
EVEN = 0.9, 0.3, 16  # even shares pay from so many idle SMs a row on, with fp32 gates, and chunks a share
WALKED = 4  # chunks that a share costs besides its own: two walked, three launches


def unit(arch: str, **params) -> Unit:
    return Unit("kda_forward", Path(__file__).parent / SOURCES[arch], arch, tuple(params.items()))


def cuts_unit(arch: str, **params) -> Unit:
    """In front of the even shares of the kernel with these params."""
    names = "K", "V", "dtype", "gate", "l2norm", "beta_sigmoid", "g_dtype", "beta_dtype", "dt_bias", "v_tile"
    params = {name: params[name] for name in names}
    return Unit("kda_forward_cuts", Path(__file__).parent / "cuts.py", arch, tuple(params.items()))


def unit_params(K: int, V: int, dtype: str, gate: str, bounded: bool, raw: bool, has_h0: bool, columns: int = 0) -> dict:
    """The parameters of form `prod` (raw) or `pre`. columns: of V a CTA walks, as many as it can if 0."""
    other = dtype if raw else "float32"
    return {"K": K, "V": V, "dtype": dtype, "gate": gate, "bounded": bounded, "l2norm": raw, "beta_sigmoid": raw,
            "g_dtype": other, "beta_dtype": other, "dt_bias": raw, "has_h0": has_h0, "v_tile": columns or v_tile(V)}  # fmt: skip


def v_tile(V: int) -> int:
    """Columns of V a CTA walks where it prepares its chunks itself: as many as it can."""
    return 128 if V % 128 == 0 else 64


SIZES = tuple((K, K, dtype) for K in (64, 128) for dtype in ("bfloat16", "float16"))
GATES = (("safe", True), ("log", True), ("softplus", False), ("log", False))
UNITS = tuple(
    partial(unit, **unit_params(K, V, dtype, gate, bounded, gate != "log", has_h0, columns))
    for sizes, gates, columns in ((SIZES, GATES, 0), (((128, 128, "bfloat16"),), GATES, 64), (((128, 256, "bfloat16"),), GATES[:2], 0))
    for K, V, dtype in sizes for gate, bounded in gates for has_h0 in (False, True)
) + tuple(
    partial(make, **unit_params(K, V, "bfloat16", gate, True, gate != "log", has_h0), **more)
    for K, V in ((64, 64), (128, 128), (128, 256)) for gate in ("safe", "log")
    for make, has_h0, more in ((cuts_unit, False, {}), (unit, False, {"shares": True}), (unit, True, {"shares": True}))
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


def shipment(K: int) -> int:
    """Bytes of a chunk's operands (forward.py, Forward.cargo)."""
    return 3 * 128 * K + 2 * 8192 + 4 * K + 256


def forward(p: Problem, x: dict) -> dict:
    operands = dense(p, x, "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    where = target.current()
    plan = CALLS.plan((p, where), partial(plan_forward, where, p))
    o, final_state, shipped, told = plan.allocate(x["q"])
    if 0 < len(told) == len(shipped):  # no shares, whose first kernel does this
        told.zero_()  # nothing has arrived
    plan.run(*operands, o, final_state, shipped, told, *plan.scalars)
    return {"o": o, "final_state": final_state}


def even(p: Problem) -> int:
    """CTAs that take even shares if the gates allow it, or 0: where that is well worth the launches. Of bounded gates in bf16
    only: others seldom close a cut."""
    sms, strips = multiprocessors(p.device), p.B * p.HV * (p.V // v_tile(p.V))
    if not p.safe_gate or p.io_dtype != torch.bfloat16:
        return 0
    share, (idle, wide, long) = strips * p.NT / sms, EVEN
    if strips < sms:
        enough = wide if p.dtypes["g"] == torch.float32 else idle
        return sms if sms - strips >= enough * strips and share >= long else 0
    return sms if share + WALKED <= 0.95 * p.NT * -(-strips // sms) else 0


def schedule(p: Problem) -> tuple[int, int, int, int, int]:
    """(columns of V a CTA walks; CTAs that prepare chunks for others; own, run and lead of helpers.py): the SMs that the walk
    leaves idle help, if they are enough to keep up."""
    rows, widest = p.B * p.HV, v_tile(p.V)
    for share, columns, *turns in SHARES:
        columns = min(columns, widest)
        idle, tasks = multiprocessors(p.device) - rows * (p.V // columns), shipped_chunks(p, *turns)
        if idle >= share * rows and tasks > 0:
            return columns, min(idle, tasks), *turns
    return widest, 0, 1, 1, 0


def shipped_chunks(p: Problem, own: int, run: int, lead: int) -> int:
    periods, rest = divmod(max(p.NT - lead, 0), own + run)
    return p.B * p.HV * (periods * run + max(rest - own, 0))


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_forward(where: target.Target, p: Problem) -> Plan:
    def name(tensor: str) -> str:
        return str(p.dtypes[tensor]).removeprefix("torch.")

    columns, helpers, *turns = schedule(p)
    params = {"K": p.K, "V": p.V, "dtype": name("q"), "gate": p.gate, "bounded": p.safe_gate, "l2norm": p.l2norm,
              "beta_sigmoid": p.beta_sigmoid, "g_dtype": name("g"), "beta_dtype": name("beta"),
              "dt_bias": "dt_bias" in p.dtypes, "has_h0": p.initial_state, "v_tile": columns}  # fmt: skip
    run, shares = where.load(unit(where.arch, **params)), even(p)
    if shares:
        params |= {"v_tile": v_tile(p.V)}
        run = either(where.load(cuts_unit(where.arch, **params)), where.load(unit(where.arch, **params, shares=True)), run)
    tasks = shipped_chunks(p, *turns) if helpers else 0
    outputs = Spec((p.B, p.T, p.HV, p.V), p.io_dtype), Spec((p.B, p.HV, p.K, p.V), torch.float32)
    scratch = Spec((tasks, shipment(p.K)), torch.uint8), Spec((3 * shares + tasks,), torch.int32)
    return Plan(run, outputs + scratch, (shares, helpers, *turns, p.scale, p.lower_bound or 0.0))


def either(cuts: Callable, shares: Callable, rows: Callable) -> Callable:
    """The three kernels one after the other: the first says which of the other two works."""

    def run(q, k, v, g, beta, A_log, dt_bias, *others) -> None:
        told, ctas, lower_bound = others[4], others[5], others[-1]
        cuts(k, g, beta, A_log, dt_bias, told, ctas, lower_bound)
        shares(q, k, v, g, beta, A_log, dt_bias, *others)
        rows(q, k, v, g, beta, A_log, dt_bias, *others)

    return run


STAGES = (Stage("forward", ("kda_forward",), forward),)

chunk_kda = kda_op(STAGES, unsupported)
