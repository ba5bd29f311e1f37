"""Which kernels really launched, by name: from the profiler on a GPU, from the emulator's launch log elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

# Kernels of torch itself that a wrapper may need (fills, copies, casts, element-wise glue); anything else must be named.
GLUE = re.compile(r"^(Memset|Memcpy)|\bat::native::|\bat_cuda_detail::|\bcub::|\belementwise_kernel")


class BlindError(RuntimeError):
    """This machine's profiler sees no kernels at all, so nothing can be said about which ones launched."""


def on_gpu(call: Callable[[], Any]) -> list[str]:
    """Names of the device kernels, copies and fills that one call launches, in order, each once. Raises BlindError."""
    import torch

    names = _profiled(call)
    if not names and not _profiled(lambda: torch.ones(8, device="cuda").add_(1)):
        raise BlindError("the profiler sees no kernels on this machine")
    return names


def _profiled(call: Callable[[], Any]) -> list[str]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return list(dict.fromkeys(e.name for e in events))


def missing(expected: Iterable[str], launched: Iterable[str]) -> list[str]:
    """Expected names (substrings) of which no launched kernel has any."""
    launched = list(launched)
    return [name for name in expected if not any(name in kernel for kernel in launched)]


def unnamed(expected: Iterable[str], launched: Iterable[str]) -> list[str]:
    """Launched kernels that no stage names and that are not torch's own glue."""
    expected = list(expected)
    return [k for k in launched if not GLUE.search(k) and not any(name in k for name in expected)]


def complaint(expected: Iterable[str], launched: Iterable[str]) -> str | None:
    """What is wrong with the launches of a rung whose stages name `expected`, or None."""
    expected, launched = list(expected), list(launched)
    faults = []
    if absent := missing(expected, launched):
        faults.append(f"named kernels never launched: {', '.join(absent)}")
    if foreign := unnamed(expected, launched):
        faults.append(f"kernels launched that no stage names: {', '.join(k[:160] for k in foreign)}")
    return "; ".join(faults) or None
