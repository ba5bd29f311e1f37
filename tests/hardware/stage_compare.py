"""A recorded stage against the emulator: bit for bit where the order of instructions fixes every rounding, else within the
stage's derived balls (stage_bounds.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import stage_bounds
from fixture_files import Fixture
from stage_replay import fixed, names, replay

VALUE = {"float32": np.float32, "float16": np.float16}


@dataclass(frozen=True)
class Row:
    """One tensor of one stage. equal: elements with the same bits; worst: distance from the ball's centre over its radius, of the
    worse of hardware and emulator (0 where bits are compared); complaint: empty where the comparison holds."""

    rung: str
    cell: str
    stage: str
    tensor: str
    output: bool
    elements: int
    equal: int
    bitwise: bool
    worst: float
    complaint: str


def values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes as numbers, float64."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(VALUE[dtype]).astype(np.float64)


@np.errstate(all="ignore")
def compare(rung: dict, stage: dict, fixture: Fixture, watch=None) -> list[Row]:
    """A row for each named tensor that the stage's launches touch. Raises emulator.EmulatorError."""
    arrays, emulated = fixture.arrays["stages"], replay(stage, fixture, watch)
    exactly = fixed(stage, fixture) is None
    balls = {} if exactly else stage_bounds.balls(stage["name"], given(rung, stage, fixture))
    rows, cell = [], f"{rung['case']}/{rung['regime']}/{rung['form']}"
    for buffer, ours in zip(stage["buffers"], emulated, strict=True):
        theirs, dtype = arrays.get(buffer["after"]), buffer.get("dtype", "uint8")
        size = {"bfloat16": 2, "float16": 2, "float32": 4}.get(dtype, 1)
        a, b = theirs.view(f"u{size}"), ours.view(f"u{size}")
        for name in names(buffer) or (["scratch"] if exactly else []):
            output = name in buffer.get("outputs", ())
            ball = balls[name] if output and not exactly else None
            bitwise, worst, complaint = ball is None, 0.0, ""
            if bitwise and (a != b).any():
                i = int(np.argmax(a != b))
                complaint = (
                    f"element {i}: hardware 0x{int(a[i]):x}, emulator 0x{int(b[i]):x}; {int((a != b).sum())} of {len(a)} differ"
                )
            elif not bitwise:
                worst, complaint = _within(values(theirs, dtype), values(ours, dtype), a != b, ball)
            rows.append(
                Row(rung["rung"], cell, stage["name"], name, output, len(a), int((a == b).sum()), bitwise, worst, complaint)
            )
    return rows


def _within(theirs: np.ndarray, ours: np.ndarray, differ: np.ndarray, ball: stage_bounds.Ball) -> tuple[float, str]:
    mid, rad = ball.mid.reshape(-1), ball.rad.reshape(-1)
    open_ = np.isnan(mid)
    if (open_ & differ).any():
        i = int(np.argmax(open_ & differ))
        return np.inf, f"element {i}, which nothing computes: hardware {theirs[i]!r}, emulator {ours[i]!r}"
    worst = 0.0
    for who, x in (("hardware", theirs), ("emulator", ours)):
        share = np.where(open_, 0.0, np.abs(x - mid) / np.maximum(rad, 1e-300))
        bad = ~(share <= 1)
        if bad.any():
            i = int(np.argmax(bad))
            return np.inf, f"{who}, element {i}: {x[i]!r}, exactly {mid[i]!r} within {rad[i]:.3g}; {int(bad.sum())} elements"
        worst = max(worst, float(share.max(initial=0.0)))
    return worst, ""


def given(rung: dict, stage: dict, fixture: Fixture) -> stage_bounds.Given:
    """The stage's inputs as numbers, from its buffers before the launches."""
    x = {}
    for buffer in stage["buffers"]:
        for name in buffer.get("inputs", ()):
            x[name] = values(fixture.arrays["stages"].get(buffer["before"]), buffer["dtype"]).reshape(buffer["shape"])
    keys = next(x[n] for n in ("q", "w", "g", "g2") if n in x)
    bounded = rung["regime"] != "init" and rung["form"] == "prod"
    io = next((b["dtype"] for b in stage["buffers"] if b.get("dtype") in ("bfloat16", "float16")), "bfloat16")
    return stage_bounds.Given(x, keys.shape[3] ** -0.5, -5.0 if bounded else None, io)
