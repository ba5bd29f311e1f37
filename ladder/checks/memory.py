"""Properties of how a rung treats memory between calls."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import torch

from _common.cache import CallCache
from ladder.checks.context import Context, Failure, NotRun, Outputs, same

LEAK_CALLS = 100
SHAPES = 1000
LATER_CALLS = 8  # outputs that live at once: more than any ring of buffers is likely to hold
WARM_CALLS = 40  # more than a bench's rounds, so that what a rung starts to remember when it is warm shows
HOST_SLACK = 32 << 20  # growth of the resident set that an allocator may show without a leak


def _clone(outputs: Outputs) -> Outputs:
    return tuple(None if t is None else t.clone() for t in outputs)


def first_output_survives(ctx: Context) -> None:
    """The second call leaves the first call's outputs alone, and answers its own inputs."""
    one, two = ctx.draw("first"), ctx.draw("second")
    ctx.supported(one)
    first = ctx.call(one)
    kept = _clone(first)
    second = ctx.call(two)
    ctx.synchronize()
    for name, a, b, k in zip(("o", "final_state"), first, second, kept):
        if a is None or b is None:
            continue
        if torch.equal(b, k):
            raise Failure(f"{name}: the second call, on other inputs of the same shape, returned the first call's values "
                          "(cached by shape, computed once, or the previous call's buffer)")  # fmt: skip
        if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            raise Failure(f"{name}: both calls returned the same buffer, so the second call overwrote the first call's output")
    same("of the first call, after a second call", first, kept)
    ctx.judged(two, second, "second call")
    later = [ctx.call(two) for _ in range(0 if ctx.slow else LATER_CALLS)]
    ctx.synchronize()
    same(f"of the first call, after {len(later) + 1} more calls (a buffer is used again)", first, kept)


def reused_input_memory(ctx: Context) -> None:
    """New values in the same input tensors give new answers: nothing is remembered by address."""
    inputs, other = ctx.draw("memory"), ctx.draw("memory, new values")
    ctx.supported(inputs)
    before = _clone(ctx.call(inputs))
    for _ in range(0 if ctx.slow else WARM_CALLS):
        ctx.call(inputs)
    for name, t in inputs.tensors.items():
        t.copy_(other.tensors[name])
    outputs = ctx.call(inputs)
    if torch.equal(outputs[0], before[0]):
        raise Failure("o: new values in the same input tensors gave the old output (cached by address)")
    ctx.judged(other, outputs, "new values in the same input tensors")


def memory_flat(ctx: Context) -> None:
    """100 calls leave as much memory allocated as 10 do, on the device and in the process."""
    if ctx.slow:
        raise NotRun(f"{LEAK_CALLS} calls take minutes under the emulator")
    inputs = ctx.base()[0]

    def settle() -> tuple[int, int]:
        return _allocated(ctx), _resident()

    for _ in range(10):
        ctx.call(inputs)
    device, host = settle()
    for _ in range(LEAK_CALLS):
        ctx.call(inputs)
    device_after, host_after = settle()
    if device_after > device:
        raise Failure(f"leaks {(device_after - device) / LEAK_CALLS:.0f} bytes of device memory a call")
    if host_after - host > HOST_SLACK:
        raise Failure(f"leaks {(host_after - host) / LEAK_CALLS / 2**20:.2f} MiB of host memory a call")


def many_shapes(ctx: Context) -> None:
    """1,000 shapes, dtypes and forms in turn: some answers judged, call caches bounded, memory as it was half way."""
    if ctx.slow:
        raise NotRun(f"{SHAPES} calls take minutes under the emulator")
    case, count = ctx.probe.case, SHAPES if ctx.kind == "cuda" else SHAPES // 10
    cells = [ctx.probe._replace(form=form, case=replace(case, B=1, T=T, dtype=dtype))
             for T in range(1, count // 4 + 1) for dtype in ("bfloat16", "float16") for form in ("pre", "prod")]  # fmt: skip
    ran, half_way = 0, 0
    for n, cell in enumerate(cells):
        inputs = ctx.draw("shapes", cell=cell)
        try:
            ctx.supported(inputs)
        except NotRun:
            continue
        outputs = ctx.call(inputs)
        if n % (count // 10) == 0:
            ctx.judged(inputs, outputs, f"shape {n + 1} of {count} in turn (T={cell.case.T}, {cell.case.dtype}, form {cell.form})")
        del inputs, outputs
        ran += 1
        if ran == count // 2:
            half_way = _allocated(ctx)
    if not ran:
        raise NotRun("the rung declines every shape")
    if (grown := _allocated(ctx) - half_way) > 0:
        raise Failure(f"holds {grown} bytes more after {ran} shapes than after half of them")
    for name, cache in vars(ctx.rung.module).items():
        if isinstance(cache, CallCache) and len(cache) > cache.limit:
            raise Failure(f"{name} holds {len(cache)} calls, accepted: {cache.limit}")


def _allocated(ctx: Context) -> int:
    ctx.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated(ctx.device) if ctx.kind == "cuda" else 0


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
