"""What a program is, how it runs in the emulator, and how two answers are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]
HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
ARCH = "sm_90a"


@dataclass(frozen=True)
class Map:
    """A tiled tensor map over the program's array `tensor`; extents innermost first, byte strides of dimensions 1 onward
    (dense where None). dtype: a name of emulator.hw.tensormap.ELEMENT_TYPES."""

    tensor: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    dtype: str = "bf16"
    swizzle: str = "none"
    fill: str = "zero"
    strides: tuple[int, ...] | None = None

    @property
    def byte_strides(self) -> tuple[int, ...]:
        from emulator.hw.tensormap import ELEMENT_TYPES

        if self.strides is not None:
            return self.strides
        size = dict(ELEMENT_TYPES.values())[self.dtype]
        return tuple(size * int(np.prod(self.dims[:i])) for i in range(1, len(self.dims)))

    def encoded(self, address: int) -> bytes:
        """The map's 128 bytes as the emulator has them."""
        from emulator.hw import tensormap

        return tensormap.encode(
            address=address, dtype=self.dtype, dims=self.dims, strides=self.byte_strides, box=self.box, swizzle=self.swizzle,
            fill=self.fill)  # fmt: skip


@dataclass(frozen=True)
class Bitwise:
    """Same bits. nan: any NaN equals any other, for arithmetic, whose payloads the emulator leaves alone."""

    nan: bool = False

    def complaint(self, inputs: Arrays, hardware: Arrays, emulated: Arrays) -> str | None:
        for name, a in hardware.items():
            b = emulated[name]
            differ = _bits(a) != _bits(b)
            if self.nan and a.dtype.kind == "f":
                differ &= ~(np.isnan(a) & np.isnan(b))
            if differ.any():
                return _first(name, differ, a, b)
        return None


@dataclass(frozen=True)
class Within:
    """Both answers within the manual's error of the exact one, float32 from float32.

    exact(*inputs in float64) gives the real result. An element may err by ulps units in the last place of the result, or
    relative * |result|, or absolute; the largest of the three holds. Elements whose result is zero, infinite, NaN or not
    a normal number have the same bits on both sides, any NaN being equal to any other. ftz: subnormals count as zero.
    """

    exact: Callable[..., np.ndarray]
    ulps: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    ftz: bool = False
    inputs: tuple[str, ...] = ("x",)

    @np.errstate(all="ignore")
    def bound(self, inputs: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(exact results, allowed errors, whether the bits count instead)."""
        given = [inputs[n].astype(np.float64) for n in self.inputs]
        if self.ftz:
            given = [np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x) for x in given]
        want = self.exact(*given)
        allowed = np.maximum(np.maximum(self.ulps * ulp32(want), self.relative * np.abs(want)), self.absolute)
        return want, allowed, ~np.isfinite(want) | (np.abs(want) < 2.0**-126) | (np.abs(want) + allowed >= 2.0**128)

    @np.errstate(all="ignore")
    def worst(self, inputs: Arrays, y: np.ndarray) -> float:
        """The largest error over what is allowed."""
        want, allowed, edge = self.bound(inputs)
        return float(np.max(np.abs(y.astype(np.float64) - want) / allowed, initial=0.0, where=~edge))

    @np.errstate(all="ignore")
    def complaint(self, inputs: Arrays, hardware: Arrays, emulated: Arrays) -> str | None:
        want, allowed, edge = self.bound(inputs)
        for who, y in (("hardware", hardware["y"]), ("emulator", emulated["y"])):
            bad = ~edge & ~(np.abs(y.astype(np.float64) - want) <= allowed)
            if bad.any():
                i = int(np.argmax(bad))
                x = ", ".join(f"{n} = {inputs[n][i]!r}" for n in self.inputs)
                return f"{who}: {x}: {y[i]!r}, exactly {want[i]!r}, allowed error {allowed[i]:.3g} ({bad.sum()} elements)"
        a, b = hardware["y"][edge], emulated["y"][edge]
        differ = (_bits(a) != _bits(b)) & ~(np.isnan(a) & np.isnan(b))
        # a subnormal result without .ftz, or one at the edge of overflow, is held to the bound instead
        loose = np.abs(a.astype(np.float64) - b) <= 2 * np.maximum(allowed[edge], self.ulps * 2.0**-149)
        differ &= ~(loose & np.isfinite(a) & np.isfinite(b))
        return _first("y (special values)", differ, a, b) if differ.any() else None


@dataclass(frozen=True)
class Program:
    """One kernel `k` of PTX and what to run it on.

    inputs   arrays by name, from a fixed seed; passed as pointers in this order, then the outputs
    outputs  name -> (shape, dtype); zero before the run
    maps     tensor maps, passed by value after the pointers, 128 bytes each
    manual   the outputs by independent arithmetic written from the PTX manual; None where only the hardware can tell
    compare  how hardware and emulator are compared
    traps    whether it ends as an illegal instruction, so that there are no outputs
    group    module it comes from
    """

    name: str
    text: str
    inputs: Arrays
    outputs: Mapping[str, tuple[tuple[int, ...], type]]
    manual: Callable[[Arrays], Arrays] | None = None
    block: int = 32
    grid: int = 1
    maps: Mapping[str, Map] = field(default_factory=dict)
    compare: Bitwise | Within = field(default_factory=Bitwise)
    traps: bool = False
    group: str = ""

    @np.errstate(all="ignore")
    def expected(self) -> Arrays | None:
        """The outputs by the manual, None where it leaves them open."""
        return self.manual(self.inputs) if self.manual else None

    def fresh(self) -> Arrays:
        """Inputs and zeroed outputs, in parameter order; copies."""
        return {n: aligned(x) for n, x in self.inputs.items()} | {
            n: aligned(np.zeros(shape, dtype)) for n, (shape, dtype) in self.outputs.items()
        }


def emulate(program: Program, seed: int | None = None, watch=None) -> Arrays:
    """The program's outputs in the emulator. Raises emulator.EmulatorError."""
    import emulator

    device, arrays = emulator.Device(ARCH, seed, watch), program.fresh()
    maps = []
    for m in program.maps.values():
        x = arrays[m.tensor]
        maps.append(m.encoded(x.ctypes.data))
        device.memory.add(x, m.tensor)
    device.launch(program.text, "k", program.grid, program.block, 0, [*arrays.values(), *maps])
    return {n: arrays[n] for n in program.outputs}


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 128."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def kernel(body: str, parameters: list[str], *, maps: tuple[str, ...] = (), shared: int = 0, registers: str = "",
           directives: str = "") -> str:  # fmt: skip
    """PTX of kernel k. Its body finds pointers as %<name> (b64, global), the address of maps as %<name>, %tid in %t, the shared
    array in %smem (aligned to 1024 bytes) and eight mbarriers' storage in %bar."""
    declared = [f".param .u64 p_{n}" for n in parameters] + [f".param .align 64 .b8 p_{n}[128]" for n in maps]
    lines = [HEAD, f".visible .entry k({', '.join(declared)}) {directives}\n{{",
             ".reg .b32 %t, %smem, %bar; .reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<16>; .reg .f32 %f<16>;",
             registers]  # fmt: skip
    lines += [f".reg .b64 %{n}; ld.param.u64 %{n}, [p_{n}]; cvta.to.global.u64 %{n}, %{n};" for n in parameters]
    lines += [f".reg .b64 %{n}; mov.b64 %{n}, p_{n}; cvta.param.u64 %{n}, %{n};" for n in maps]
    if shared:
        lines += [
            f".shared .align 1024 .b8 array[{shared}]; .shared .align 8 .b8 bars[64];",
            "mov.u32 %smem, array; mov.u32 %bar, bars;",
        ]
    return "\n".join([*lines, "mov.u32 %t, %tid.x;", body, "ret;\n}\n"])


def lanes(
    name: str, body: str, inputs: Arrays, outputs: Mapping[str, type], manual, compare=None, registers: str = ""
) -> Program:
    """A program that runs `body` once per element: it finds each input in a register of its name and leaves each output in
    one, as wide as the arrays' elements. All inputs have one length, a multiple of 32."""
    n = len(next(iter(inputs.values())))
    block = next(b for b in (256, 128, 64, 32) if n % b == 0)
    code = [".reg .b32 %i; mov.u32 %i, %ctaid.x; mad.lo.u32 %i, %i, " + f"{block}, %t; .reg .b64 %at;"]
    for x, dtype in [(k, v.dtype) for k, v in inputs.items()] + list(outputs.items()):
        code.append(f".reg .b{8 * np.dtype(dtype).itemsize} {x};")
    for x, v in inputs.items():
        code.append(f"mad.wide.u32 %at, %i, {v.itemsize}, %{x}; ld.global.b{8 * v.itemsize} {x}, [%at];")
    code.append(f"{{ {body} }}")
    for y, dtype in outputs.items():
        size = np.dtype(dtype).itemsize
        code.append(f"mad.wide.u32 %at, %i, {size}, %{y}; st.global.b{8 * size} [%at], {y};")
    text = kernel("\n".join(code), [*inputs, *outputs], registers=registers)
    return Program(name, text, inputs, {y: ((n,), dtype) for y, dtype in outputs.items()}, manual, block, n // block,
                   compare=compare or Bitwise())  # fmt: skip


def ulp32(x: np.ndarray) -> np.ndarray:
    """Spacing of float32 numbers at |x| (float64)."""
    x = np.where(np.isfinite(x), x, 0.0)
    return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 24, -149))


def generator(name: str) -> np.random.Generator:
    """The random numbers of one program: the same everywhere, different for every name."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


SPECIAL = np.array([
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF,
    0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x33000000,
    0x33000001, 0x32FFFFFF, 0x38800000, 0x387FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x4F000000, 0xCF000000,
], np.uint32)  # fmt: skip
"""Bits of float32 values at the edges of float32, bf16 and fp16: zeros, subnormals, largest numbers, infinities, NaNs, ties."""


def floats(name: str, n: int, low: int = -30, high: int = 30, special: bool = True) -> np.ndarray:
    """n float32 values: the special ones, then random signs, mantissas and exponents in [low, high)."""
    rng = generator(name)
    x = rng.uniform(1, 2, n) * rng.choice([-1.0, 1.0], n) * np.exp2(rng.integers(low, high, n))
    out = x.astype(np.float32)
    if special:
        out[: len(SPECIAL)] = SPECIAL.view(np.float32)
    return out


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def _first(name: str, differ: np.ndarray, a: np.ndarray, b: np.ndarray) -> str:
    i = tuple(int(k[0]) for k in np.nonzero(differ))
    return (f"{name}{list(i)}: hardware {a[i]!r} (0x{int(_bits(a)[i]):x}), emulator {b[i]!r} (0x{int(_bits(b)[i]):x}); "
            f"{int(differ.sum())} of {differ.size} differ")  # fmt: skip
