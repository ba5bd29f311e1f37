"""A Triton driver whose device is the emulator: kernels compile for a named architecture and their PTX runs on CPU
tensors.

`activate` must be called in a fresh process, before anything imports fla: fla asks for the device when it is
imported. Autotuners do not time anything (every configuration ties, so the first one that survives pruning wins)
unless recorded choices are given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from .errors import EmulatorError, UnsupportedInstruction
from .launch import Device, parameter_block
from .memory import GlobalMemory

# compute capability, device name, SM count, opt-in shared memory per block (CUDA programming guide, compute
# capabilities table)
DEVICES = {
    "sm_90a": ((9, 0), "NVIDIA H200", 132, 232448),
    "sm_100a": ((10, 0), "NVIDIA B200", 148, 232448),
    "sm_103a": ((10, 3), "NVIDIA B300", 148, 232448),
}


def _driver_class():
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def __init__(self, arch):
            self.arch = arch

        def get_device_properties(self, device):
            _, _, sms, smem = DEVICES[self.arch]
            return {
                "max_shared_mem": smem,
                "multiprocessor_count": sms,
                "max_num_regs": 65536,
                "warpSize": 32,
                "sm_clock_rate": 1,
                "mem_clock_rate": 1,
                "mem_bus_width": 1,
            }

        def load_binary(self, name, kernel, shared, device):
            return object(), name, 0, 0, 1024  # module, function, registers, spills, most threads

        def unload_module(self, module):
            pass

    class EmulatorDriver(DriverBase):
        def __init__(self, device):
            self.device, self.utils = device, Utils(device.arch)
            self.launcher_cls = lambda src, metadata: _Launcher(device, src, metadata)

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            major, minor = DEVICES[self.device.arch][0]
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_device_interface(self):
            return torch.cpu

        def get_current_device(self):
            return 0

        def set_current_device(self, device):
            pass

        def get_current_stream(self, device=0):
            return 0

        def get_benchmarker(self):
            return lambda call, quantiles=None, **_: [1.0] * (len(quantiles) if quantiles else 1)

        def get_empty_cache_for_benchmark(self):
            return torch.empty(1)

        def clear_cache(self, cache):
            pass

    return triton, EmulatorDriver


class _Launcher:
    """What a compiled kernel calls: gathers the PTX parameters and runs the grid."""

    def __init__(self, device, src, metadata):
        self.device, self.metadata = device, metadata
        names, self.signature = src.fn.arg_names, src.signature
        self.names = names
        self._ptx = None

    def ptx(self):
        if self._ptx is None:
            from triton.runtime.cache import get_cache_manager

            files = get_cache_manager(self.metadata.hash).get_group(f"{self.metadata.name}.json") or {}
            path = next((p for n, p in files.items() if n.endswith(".ptx")), None)
            if path is None:
                raise EmulatorError(f"Triton's cache has no PTX of {self.metadata.name}")
            self._ptx = Path(path).read_text()
        return self._ptx

    def __call__(self, gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args):
        md, memory = self.metadata, GlobalMemory()
        if md.num_ctas != 1:
            raise UnsupportedInstruction(f"{md.name}: Triton clusters (num_ctas={md.num_ctas}) are not modelled")
        values = []
        for name, value in zip(self.names, args):
            if self.signature[name] == "constexpr":
                continue
            if hasattr(value, "data_ptr"):
                value = memory.add(value, f"{name} {list(value.shape)}")
            values.append(int(value) if isinstance(value, bool) else value)
        keep = []
        for kind in ("global_scratch", "profile_scratch"):  # two trailing pointers; scratch lives for one launch
            size = getattr(md, kind + "_size") * gx * gy * gz
            if size:
                import torch

                keep.append(torch.empty(size + 128, dtype=torch.uint8))
                memory.add(keep[-1], kind)
                values.append(-(-keep[-1].data_ptr() // 128) * 128)
            else:
                values.append(0)
        from .launch import decode

        kernel = decode(self.ptx()).kernels[md.name]
        if self.device.on_launch:
            self.device.on_launch(md.name, (gx, gy, gz), memory)
        device = self.device
        strict, device.strict_waits = (
            device.strict_waits,
            False,
        )  # Triton 3.9 uses tcgen05.ld results without their wait
        try:
            self._launch(kernel, values, memory, gx, gy, gz)
        finally:
            device.strict_waits = strict

    def _launch(self, kernel, values, memory, gx, gy, gz):
        md = self.metadata
        self.device.launch(
            self.ptx(),
            md.name,
            (gx, gy, gz),
            32 * md.num_warps,
            md.shared,
            parameter_block(kernel, values, memory),
            memory=memory,
        )


def activate(arch="sm_90a", configs=None, seed=None, watch=None) -> Device:
    """Make the emulator Triton's device for the rest of this process; returns the Device (its `stats` list every
    launch).

    arch     "sm_90a", "sm_100a" or "sm_103a"
    configs  recorded autotune choices for fla's kernels: {kernel name: {"kwargs": {...}, "num_warps": n,
    "num_stages": n}};
             a kernel that is not named gets its first pruned configuration
    Raises RuntimeError when fla is already imported, ValueError for an unknown arch.
    """
    if "fla" in sys.modules:
        raise RuntimeError("emulator.triton_driver.activate must be called before fla is imported")
    if arch not in DEVICES:
        raise ValueError(f"arch: {arch!r}, accepted {', '.join(DEVICES)}")
    if configs:
        _write_configs(configs)
    device = Device(arch, seed, watch)
    triton, driver = _driver_class()
    triton.runtime.driver.set_active(driver(device))
    import torch

    capability, name, sms, smem = DEVICES[arch]
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: name
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    return device


def _write_configs(configs):
    """Hand recorded choices to fla's own configuration cache (its FLA_CONFIG_DIR and FLA_CACHE_MODE, read at
    import)."""
    folder = Path(tempfile.mkdtemp(prefix="fla-configs-"))
    for kernel, c in configs.items():
        full = {"num_ctas": 1, "maxnreg": None, **c}
        (folder / f"{kernel}.json").write_text(json.dumps({"kernel_name": kernel, "default_config": full}))
    os.environ["FLA_CONFIG_DIR"], os.environ["FLA_CACHE_MODE"] = str(folder), "default"
