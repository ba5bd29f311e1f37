"""Programs on a GPU, through the CUDA driver API in libcuda alone: PTX text in, outputs back."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p

import numpy as np
from programs.program import Map, Program

DATA_TYPES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
}  # CUtensorMapDataType
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
FILLS = {"zero": 0, "nan": 1}
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
LOG = 8192


class CudaError(RuntimeError):
    """A driver call failed: which, and the driver's word for it. A failed launch leaves the process without a GPU."""


class Gpu:
    """The first CUDA device. run(program) -> (outputs by name, the 64 bytes that matter of each tensor map by name)."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.cuGetErrorName.argtypes = [c_int, ctypes.POINTER(c_char_p)]
        device, context = c_int(), c_void_p()
        self.call("cuInit", c_uint(0))
        self.call("cuDeviceGet", byref(device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            word = c_char_p()
            self.cuda.cuGetErrorName(code, byref(word))
            raise CudaError(f"{name}: {(word.value or b'error').decode()} ({code})")

    def version(self) -> int:
        """The driver's CUDA version, as 1000 * major + 10 * minor."""
        out = c_int()
        self.call("cuDriverGetVersion", byref(out))
        return out.value

    def run(self, program: Program) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
        """Raises CudaError: with the assembler's words where the PTX is not accepted."""
        function, module = self.load(program.text)
        arrays, addresses = program.fresh(), {}
        try:
            for name, x in arrays.items():
                addresses[name] = c_uint64()
                self.call("cuMemAlloc_v2", byref(addresses[name]), ctypes.c_size_t(max(x.nbytes, 16)))
                self.call("cuMemcpyHtoD_v2", addresses[name], c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
            maps = {name: self.tensor_map(m, addresses[m.tensor].value) for name, m in program.maps.items()}
            parameters = (c_void_p * (len(addresses) + len(maps)))(
                *(ctypes.addressof(a) for a in addresses.values()), *(m.ctypes.data for m in maps.values()))  # fmt: skip
            shape = [c_uint(n) for n in (program.grid, 1, 1, program.block, 1, 1, 0)]  # grid, block, dynamic shared bytes
            self.call("cuLaunchKernel", function, *shape, c_void_p(0), parameters, c_void_p(0))
            self.call("cuCtxSynchronize")
            for name in program.outputs:
                x = arrays[name]
                self.call("cuMemcpyDtoH_v2", c_void_p(x.ctypes.data), addresses[name], ctypes.c_size_t(x.nbytes))
        finally:
            for a in addresses.values():
                self.cuda.cuMemFree_v2(a)
            self.cuda.cuModuleUnload(module)
        return {n: arrays[n] for n in program.outputs}, {n: bytes(8) + m.tobytes()[8:64] for n, m in maps.items()}

    def load(self, text: str) -> tuple[c_void_p, c_void_p]:
        module, function, log = c_void_p(), c_void_p(), ctypes.create_string_buffer(LOG)
        options = (c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), LOG)
        try:
            self.call("cuModuleLoadDataEx", byref(module), c_char_p(text.encode()), c_uint(2), options, values)
        except CudaError as e:
            raise CudaError(f"{e}: {log.value.decode(errors='replace')[:1000]}") from None
        self.call("cuModuleGetFunction", byref(function), module, c_char_p(b"k"))
        return function, module

    def tensor_map(self, m: Map, address: int) -> np.ndarray:
        """The 128 bytes that cuTensorMapEncodeTiled writes for m, at an address that is a multiple of 64."""
        raw = np.zeros(192, np.uint8)
        out = raw[-raw.ctypes.data % 64 :][:128]
        rank = len(m.dims)
        self.call("cuTensorMapEncodeTiled", c_void_p(out.ctypes.data), c_int(DATA_TYPES[m.dtype]), c_uint32(rank),
                  c_void_p(address), (c_uint64 * rank)(*m.dims), (c_uint64 * max(rank - 1, 1))(*m.byte_strides),
                  (c_uint32 * rank)(*m.box),
                  (c_uint32 * rank)(*([1] * rank)), c_int(0), c_int(SWIZZLES[m.swizzle]), c_int(0),
                  c_int(FILLS[m.fill]))  # fmt: skip
        return out


class Emulated:
    """The emulator in the same place: run(program) answers in the same form."""

    def run(self, program: Program) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
        from programs.program import emulate

        return emulate(program), {n: m.encoded(0)[:64] for n, m in program.maps.items()}
