"""A target on which CuTe units run emulated: their own compiled host code runs on CPU tensors, its launches run on
the engine.

The host code of a unit (TMA descriptors, grid, parameter block) is ordinary CPU code that calls a dozen CUDA runtime
functions; they are provided by standin.c, built here with the system's C compiler. TVM-FFI hands the tensors over;
CPU tensors pass as CUDA ones by saying so in their DLPack header.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from .errors import EmulatorError
from .launch import Device, decode, triple
from .memory import GlobalMemory
from .triton_driver import DEVICES

_SOURCE = Path(__file__).with_name("standin.c")
_KDLCUDA, _ATTRIBUTE_BYTES, _CLUSTER_DIMENSION = 2, 72, 4
_FAILED = 719  # cudaErrorLaunchFailure


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def tuple(self):
        return self.x, self.y, self.z


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    ]


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))


def build_standin(folder: Path) -> Path:
    """The stand-in runtime as a shared library in `folder`, compiled if it is not there. Raises EmulatorError
    without a C compiler."""
    source = _SOURCE.read_bytes()
    out = folder / f"libcudart-standin-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if out.exists():
        return out
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise EmulatorError("the stand-in runtime needs a C compiler (cc, gcc or clang); none was found")
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    r = subprocess.run(
        [compiler, "-O2", "-w", "-shared", "-fPIC", "-o", temporary, str(_SOURCE)], capture_output=True, text=True
    )
    if r.returncode:
        os.unlink(temporary)
        raise EmulatorError(f"{compiler} could not build the stand-in runtime: {r.stderr[:400]}")
    os.replace(temporary, out)
    return out


_RENAMED = (
    (b"_cuda", b"_emul"),
    (b"_cuKernel", b"_emKernel"),
    (b"cuda_dialect_", b"emul_dialect_"),
    (b"CuteDSLRT_", b"EmulDSLRT_"),
)


def rebind(so: Path, folder: Path) -> Path:
    """A copy of a unit's shared object whose imports of the CUDA runtime and of the DSL's runtime carry the
    stand-in's names.

    Only names in the dynamic string table change, each for one of equal length, so nothing moves. The copy cannot
    reach a real driver, whatever else the process has loaded.
    """
    data = bytearray(so.read_bytes())
    out = folder / f"{so.stem}-{hashlib.sha256(data).hexdigest()[:16]}.so"
    if out.exists():
        return out
    if data[:6] != b"\x7fELF\x02\x01":
        raise EmulatorError(f"{so}: not a 64-bit little-endian ELF object")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    base = sections[names][4]
    for name, _, _, _, offset, length, *_ in sections:
        if data[base + name : base + name + 8] == b".dynstr\0":
            strings = bytes(data[offset : offset + length]).split(b"\0")
            for i, s in enumerate(strings):
                for old, new in _RENAMED:
                    if s.startswith(old):
                        strings[i] = new + s[len(old) :]
            data[offset : offset + length] = b"\0".join(strings)
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    with os.fdopen(handle, "wb") as f:
        f.write(data)
    os.replace(temporary, out)
    return out


class _Standin:
    """The loaded stand-in: one per process, since its symbols are global. `active` takes the launches."""

    def __init__(self):
        from _common.cute import BUILD

        self.folder = BUILD / "emulator"
        self.library = ctypes.CDLL(str(build_standin(self.folder)), mode=ctypes.RTLD_GLOBAL)
        self._callback = _CALLBACK(self._launch)
        self.active, self.error = None, None

    def enter(self, unit):
        (major, minor), _, sms, shared = DEVICES[unit.target.arch]
        self.library.standin_setup(self._callback, major, minor, sms, shared)
        self.active, self.error = unit, None

    def _launch(self, config, name, args):
        try:
            self.active.launch(config.contents, name.decode(), args)
            return 0
        except BaseException as e:  # noqa: BLE001  an exception cannot cross the C frames: kept, raised after the call
            self.error = e
            return _FAILED


@functools.cache
def _standin():
    return _Standin()


class _AsCuda:
    """A CPU tensor whose DLPack capsule says CUDA device 0."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return _KDLCUDA, 0

    def __dlpack__(self, **_):
        capsule = self.tensor.detach().__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor begins with the data pointer, then DLDevice {int32 type, int32 id}
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = _KDLCUDA
        return capsule


class LoadedUnit:
    """Callable host function of a unit: fn(*torch CPU tensors, *scalars)."""

    def __init__(self, target, ptx, function, name):
        self.target, self.ptx, self.function, self.name = target, ptx, function, name
        self.memory = None

    def __call__(self, *args):
        import tvm_ffi

        self.memory = GlobalMemory()
        converted = []
        for i, a in enumerate(args):
            if hasattr(a, "data_ptr"):
                if a.device.type != "cpu":
                    raise EmulatorError(f"{self.name}: argument {i} is on {a.device}; the emulator takes CPU tensors")
                if a.numel():
                    self.memory.add(a, f"argument {i} {list(a.shape)}")
                a = tvm_ffi.from_dlpack(_AsCuda(a))
            converted.append(a)
        standin = _standin()
        standin.enter(self)
        try:
            result = self.function(*converted)
        except Exception:
            if standin.error is not None:
                raise standin.error from None
            raise
        finally:
            self.memory, standin.active = None, None
        if standin.error is not None:
            raise standin.error
        return result

    def launch(self, config, name, args):
        """Called for each launch of the host function: reads the parameter block and runs the grid."""
        kernel = decode(self.ptx).kernels.get(name)
        if kernel is None:
            raise EmulatorError(f"{self.name}: launches {name}, which is not in its PTX")
        block = bytearray(max((p.offset + p.size for p in kernel.params), default=0))
        for i, p in enumerate(kernel.params):
            block[p.offset : p.offset + p.size] = ctypes.string_at(args[i], p.size)
        cluster = (1, 1, 1)
        for i in range(config.count):
            at = config.attributes + i * _ATTRIBUTE_BYTES
            if ctypes.c_int32.from_address(at).value == _CLUSTER_DIMENSION:
                cluster = _Dim3.from_address(at + 8).tuple()
        self.target.device.launch(
            self.ptx,
            name,
            config.grid.tuple(),
            config.block.tuple(),
            config.shared,
            bytes(block),
            triple(cluster),
            memory=self.memory,
        )


class EmulatedTarget:
    """Stands in for a GPU in _common.target: `arch`, and `load(unit)`, which gives the unit's host function on CPU
    tensors.

    seed, watch: as for emulator.Device. `device.stats` lists the launches.
    """

    def __init__(self, arch="sm_90a", seed=None, watch=None, device=None):
        self.device = device or Device(arch, seed, watch)
        self.arch = self.device.arch
        self._loaded = {}

    def load(self, unit):
        """Compile (or find) the unit for its own arch and wrap it. Raises _common.cute.CompileError, EmulatorError."""
        from _common.cute import compile_unit

        if unit not in self._loaded:
            artifact = compile_unit(unit)
            self._loaded[unit] = self.wrap(artifact.so, artifact.ptx.read_text(), unit.name)
        return self._loaded[unit]

    def wrap(self, so, ptx, name):
        """The host function `name` of an exported TVM-FFI shared object `so`, launching kernels of `ptx` text."""
        import tvm_ffi

        module = tvm_ffi.load_module(str(rebind(Path(so), _standin().folder)))
        return LoadedUnit(self, ptx, getattr(module, name), name)
