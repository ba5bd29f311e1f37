"""Properties of streams, threads and CUDA graphs."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import torch

from kernels.kda.contract import ContractError, Unsupported
from ladder import timing
from ladder.checks.context import Context, Failure, NotRun, Outputs, same
from ladder.judge import starved

OVERLAPPED = 20  # calls of each of two at once
BUSY_CYCLES = 200_000_000  # a tenth of a second at 2 GHz: longer than any wrong launch takes to overtake


def second_stream(ctx: Context) -> None:
    """All work is on the caller's stream: inputs written there just before are seen, outputs copied there are whole."""
    ctx.needs_gpu("streams")
    values = ctx.draw("stream")
    ctx.supported(values)
    warm = ctx.call(values)
    inputs, stream = values.clone(), torch.cuda.Stream(ctx.device)
    for t in inputs.tensors.values():
        t.fill_(torch.nan)
    ctx.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for name, t in inputs.tensors.items():
            t.copy_(values.tensors[name])
        outputs = ctx.call(inputs)
        copies = tuple(None if t is None else t.clone() for t in outputs)
        ahead = not stream.query()
    stream.synchronize()
    if not ahead:
        raise Failure("waits for the device inside the call, which cannot be captured or overlapped")
    same("on a second stream, against the default stream (work was launched elsewhere?)", copies, warm)
    ctx.judged(values, copies, "on a second stream")


def two_streams(ctx: Context) -> None:
    """Calls that overlap on two streams share no scratch: each gives the bits that it gives alone."""
    ctx.needs_gpu("streams")
    inputs = [ctx.draw("streams", n) for n in range(2)]
    ctx.supported(inputs[0])
    alone = [ctx.call(x) for x in inputs]
    ctx.synchronize()
    streams = [torch.cuda.Stream(ctx.device) for _ in inputs]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES // 10)  # both queues are full before either begins
    together: list[list[Outputs]] = [[], []]
    for _ in range(OVERLAPPED):
        for x, stream, out in zip(inputs, streams, together):
            with torch.cuda.stream(stream):
                out.append(ctx.call(x))
    ctx.synchronize()
    for n, (outs, before) in enumerate(zip(together, alone)):
        for out in outs:
            same(f"on stream {n + 1} of two at once, against a call alone", out, before)


def second_device(ctx: Context) -> None:
    """Tensors on a GPU that is not the current one: the bits of the current one, there, or a refusal in one line."""
    ctx.needs_gpu("devices")
    if torch.cuda.device_count() < 2:
        raise NotRun("needs a second GPU")
    inputs = ctx.draw("devices")
    ctx.supported(inputs)
    here = ctx.call(inputs)
    other = torch.device("cuda", next(n for n in range(torch.cuda.device_count()) if n != ctx.device.index))
    moved = replace(inputs, tensors={name: t.to(other) for name, t in inputs.tensors.items()})
    try:
        there = ctx.call(moved)
        torch.cuda.synchronize(other)
    except (ContractError, Unsupported) as refusal:
        if "\n" in str(refusal) or not str(refusal):
            raise Failure(f"refused in {len(str(refusal).splitlines())} lines, accepted: one") from None
        return
    same("on a GPU that is not the current one", tuple(None if t is None else t.to(ctx.device) for t in there), here)


def two_threads(ctx: Context) -> None:
    """Calls from two threads at once, each on a stream of its own, give the bits that each gives alone."""
    if ctx.slow:
        raise NotRun("the emulator runs one call at a time")
    inputs = [ctx.draw("threads", n) for n in range(2)]
    ctx.supported(inputs[0])
    alone = [ctx.call(x) for x in inputs]
    ctx.synchronize()
    errors: list[BaseException] = []

    def work(n: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(ctx.device)) if ctx.kind == "cuda" else contextlib.nullcontext()
        try:
            with stream:
                for _ in range(OVERLAPPED):
                    out = ctx.call(inputs[n])
                    if ctx.kind == "cuda":
                        torch.cuda.current_stream(ctx.device).synchronize()
                    same(f"in thread {n + 1} of two at once, against a call alone", out, alone[n])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0] if isinstance(errors[0], Failure) or starved(errors[0]) else Failure(f"two threads at once: {type(errors[0]).__name__}: {errors[0]}")


def graph(ctx: Context) -> None:
    """Captured once, replayed on new input values into poisoned outputs, it gives the new answer."""
    ctx.needs_gpu("CUDA graphs")
    inputs, other = ctx.draw("graph"), ctx.draw("graph, new values")
    ctx.supported(inputs)
    ctx.call(inputs)
    ctx.synchronize()
    captured, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ctx.device)
    recording = torch.cuda.graph(captured)
    try:
        with recording:
            outputs = ctx.call(inputs)
    except Exception as error:
        timing.abandon(captured, recording.capture_stream)  # the properties to come must not suffer for it
        torch.cuda.set_stream(current)
        ctx.synchronize()
        if starved(error):
            raise
        raise Failure(f"cannot be captured in a CUDA graph: {' '.join(str(error).split())[:300]}") from None
    for name, t in inputs.tensors.items():
        t.copy_(other.tensors[name])
    for t in outputs:
        if t is not None:
            t.fill_(torch.nan)
    captured.replay()
    ctx.synchronize()
    if torch.isnan(outputs[0]).all():
        raise Failure("the captured graph does not write o: its work was launched on another stream or not at all")
    ctx.judged(other, outputs, "graph replay on new input values")
    eager = ctx.call(other)
    same("of a graph replay, against an eager call", outputs, eager)
