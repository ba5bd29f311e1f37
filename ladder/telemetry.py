"""Clocks, temperature, power and throttle reasons of the GPU, sampled while a cell is being timed."""

from __future__ import annotations

import threading
from typing import Any

PERIOD_S = 0.05


class Telemetry:
    """Samples one GPU in a thread between __enter__ and __exit__; `summary()` afterwards.

    Never fails a run: where the management library or the driver will not answer, the summary says why.
    """

    def __init__(self, index: int = 0, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self.samples: list[dict[str, Any]] = []
        self.absent: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._handle: Any = None
        self._index = index

    def __enter__(self) -> Telemetry:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, _handle(pynvml, self._index)
        except Exception as error:  # whatever the library raises: the run matters more
            self.absent = f"{type(error).__name__}: {error}"
            return self
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._nvml.nvmlShutdown()

    def _watch(self) -> None:
        while True:
            try:
                self.samples.append(self._sample())
            except Exception as error:
                self.absent = f"{type(error).__name__}: {error}"
                return
            if self._stop.wait(self.period_s):
                return

    def _sample(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "temp_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "throttle": throttle_names(nvml, reasons),
        }

    def summary(self) -> dict[str, Any]:
        """sm_mhz: [lowest, median, highest]; the highest temperature and power; every throttle reason seen."""
        if not self.samples:
            return {"absent": self.absent or "no sample"}
        clocks = sorted(s["sm_mhz"] for s in self.samples)
        return {
            "samples": len(self.samples), "sm_mhz": [clocks[0], clocks[len(clocks) // 2], clocks[-1]],
            "mem_mhz": min(s["mem_mhz"] for s in self.samples), "temp_c": max(s["temp_c"] for s in self.samples),
            "power_w": max(s["power_w"] for s in self.samples),
            "throttle": sorted({name for s in self.samples for name in s["throttle"]}),
        }  # fmt: skip


def throttle_names(nvml: Any, reasons: int) -> list[str]:
    """Names of the set bits, `SwPowerCap` and the like (NVML, NvmlClocksEventReasons); idle is no throttling."""
    prefix = "nvmlClocksThrottleReason"
    names = {n.removeprefix(prefix): getattr(nvml, n) for n in dir(nvml) if n.startswith(prefix)}
    skip = ("GpuIdle", "None", "All")
    return sorted(n for n, bit in names.items() if n not in skip and isinstance(bit, int) and bit and reasons & bit == bit)


def _handle(nvml: Any, index: int) -> Any:
    """The management handle of torch's device `index`: by UUID, because the two libraries may number devices apart."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
