"""How a call is timed on a CUDA device.

Device time is the time between two CUDA events around one graph replay, or around the eager call where the callee
cannot be captured (then the host's launch overhead is in it, and the row says `events`). Before each sample the queue
is empty and the L2 cache is filled with clean lines of an unrelated buffer, outside the timed region. TIMING_VERSION
is part of every rung's code hash: raise it when numbers before and after a change cannot be compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

TIMING_VERSION = 1
COPY_BYTES = 1 << 30
COPY_REPEATS = 15
REPLAY_AGREES = 1e-3  # of a row; bitwise equality is for `check` to ask
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Call = Callable[[], Any]


class CaptureError(RuntimeError):
    """The callee cannot be timed by graph replay; the message says why."""


class ReplayError(CaptureError):
    """The callee was captured, but its replay does not do the work of the call."""


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors a call returned: o, and the final state if there is one."""
    return [t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, torch.Tensor)]


def worst_row(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest row difference (L2, over the RMS row norm) among matching tensors; infinite for NaN or other shapes."""
    worst = 0.0
    if len(outputs) != len(expected):
        return float("inf")
    for a, b in zip(outputs, expected):
        if a.shape != b.shape:
            return float("inf")
        difference = (a.float() - b.float()).square().sum(-1)
        scale = b.float().square().sum(-1).mean().clamp_min(1e-30)
        error = float((difference.max() / scale).sqrt())
        worst = max(worst, error if error == error else float("inf"))
    return worst


def abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """End a capture that has failed, for torch too; whether that is known to have worked.

    capture_end gives up where CUDA's own call does, so that the allocator still records into the pool, and the random
    generator is still in capture mode: later captures, draws and replays of older graphs would fail. CUDA has left the
    capture by then, so an empty one is begun in the driver, and torch's capture_end ends that in its place.
    """
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "The CUDA Graph is empty."
        with contextlib.suppress(Exception):
            graph.capture_end()
            return True
        with contextlib.suppress(Exception):
            ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), RELAXED)
            graph.capture_end()
            return True
        with contextlib.suppress(Exception), torch.cuda.stream(torch.cuda.Stream(stream.device)):
            other = torch.cuda.CUDAGraph()  # it had not begun for torch: a capture that ends well takes the generator along
            other.capture_begin()
            other.capture_end()
    return False


class CudaTimer:
    """Times callables on one CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._unrelated = torch.ones(4 * l2 // 4, dtype=torch.float32, device=device)  # four times the cache
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._anchor: torch.cuda.CUDAGraph | None = None

    def flush(self) -> None:
        """Evict everything from L2 by reading four times its size; reads leave no dirty lines to write back later."""
        torch.sum(self._unrelated, dim=0, out=self._sum)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, call: Call) -> Call:
        """A replay of `call`, shown to do the same work: its outputs are poisoned, replayed and compared with an eager
        call's. Raises CaptureError, ReplayError. All captures share one memory pool, so that only one replay's outputs
        are alive at a time.
        """
        self.synchronize()
        expected = [t.clone() for t in outputs_of(call())]
        graph = torch.cuda.CUDAGraph()
        try:
            if self._anchor is None:
                self._new_pool()
            outputs = outputs_of(self._record(graph, call))
        except Exception as error:
            self.synchronize()
            raise CaptureError(f"cannot be captured: {' '.join(str(error).split())[:200]}") from None
        if len(outputs) != len(expected):
            raise ReplayError(f"returned {len(outputs)} tensors under capture, {len(expected)} before")
        with torch.inference_mode():  # a callee may have made them in that mode
            for t in outputs:
                t.fill_(float("nan"))
        graph.replay()
        self.synchronize()
        if (difference := worst_row(outputs, expected)) > REPLAY_AGREES:
            unwritten = sum(int(torch.isnan(t).sum()) for t in outputs)
            raise ReplayError(f"graph replay does not do the call's work: a row differs by {difference:.2g}"
                              + (f", {unwritten} elements are not written" if unwritten else ""))  # fmt: skip
        return graph.replay

    def _new_pool(self) -> None:
        """A memory pool for captures, and a graph that keeps it: torch refuses a pool whose last graph is gone."""
        self._pool, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        self._record(anchor, self._sum.zero_)
        self._anchor = anchor

    def _record(self, graph: torch.cuda.CUDAGraph, call: Call) -> Any:
        """Capture without torch.cuda.graph's emptying of the allocator's cache, which costs more than most captures."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        collecting = gc.isenabled()
        gc.disable()  # a dropped graph that is destroyed meanwhile would spoil the capture
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self._pool)
                result = call()
                graph.capture_end()  # raises where the callee has left another stream current
        except BaseException:
            if not abandon(graph, self.stream):
                self.stream, self._anchor = torch.cuda.Stream(self.device), None
            raise
        finally:
            if collecting:
                gc.enable()
        return result

    def device_ms(self, run: Call) -> float:
        """Milliseconds of device time of one run, L2 cold."""
        self.synchronize()
        self.flush()
        self._start.record()
        run()
        self._end.record()
        self.synchronize()
        return self._start.elapsed_time(self._end)

    def wall_ms(self, call: Call) -> float:
        """Milliseconds on the host's clock from the call until the device is idle again, L2 cold."""
        self.flush()
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def copy_gbps(self) -> float:
        """Device-to-device copy rate, bytes read plus bytes written, median of several 1 GiB copies, in GB/s."""
        own = torch.Generator(self.device).manual_seed(0)
        source = torch.randint(0, 255, (COPY_BYTES,), generator=own, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = [self.device_ms(lambda: target.copy_(source)) for _ in range(COPY_REPEATS + 2)][2:]
        return 2 * COPY_BYTES / (statistics.median(times) * 1e-3) / 1e9

    def release(self) -> None:
        """Give memory of dropped captures and inputs back to the device."""
        self.synchronize()
        self._anchor = None
        gc.collect()
        torch.cuda.empty_cache()

    def launched(self, call: Call) -> list[str]:
        """Names of the kernels that one call launches; nothing where the profiler is blind."""
        from ladder import witness

        try:
            return witness.on_gpu(call)
        except witness.BlindError:
            return []

    def describe(self) -> dict[str, Any]:
        return describe_device(self.device)


def describe_device(device: torch.device) -> dict[str, Any]:
    """name, arch, driver, sms, memory (bytes) and l2 (bytes) of a CUDA device."""
    p = torch.cuda.get_device_properties(device)
    return {"name": p.name, "arch": device_arch(device), "driver": _driver(), "sms": p.multi_processor_count,
            "memory": p.total_memory, "l2": p.L2_cache_size}  # fmt: skip


def device_arch(device: torch.device) -> str:
    """sm_90a, sm_100a, ...: the architecture whose specific instructions the device runs."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # whatever the library raises: the version is a nicety
        return None
