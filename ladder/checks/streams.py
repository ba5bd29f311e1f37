"""Properties of streams and CUDA graphs."""

from __future__ import annotations

import torch

from ladder.checks.context import Context, Failure, same

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


def graph(ctx: Context) -> None:
    """Captured once, replayed on new input values into poisoned outputs, it gives the new answer."""
    ctx.needs_gpu("CUDA graphs")
    inputs, other = ctx.draw("graph"), ctx.draw("graph, new values")
    ctx.supported(inputs)
    ctx.call(inputs)
    ctx.synchronize()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            outputs = ctx.call(inputs)
    except Exception as error:
        ctx.synchronize()
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
