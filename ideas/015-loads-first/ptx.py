"""Single PTX instructions as functions of registers and byte addresses, for kernels that place every byte themselves.

Addresses: shared memory as Int32, global memory as Int64. `off` is an immediate in bytes. A packed pair is an Int32
that holds two bf16 or f16, the lower index in the lower half. Names of pair types: "bf16" or "f16".
Source: PTX ISA, sections 9.7.3 (ex2, rcp, rsqrt, lg2), 9.7.9 (ld, st, cvt) and 9.7.14.5 (mma, ldmatrix, stmatrix).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

_ptx = cute.arch.inline_ptx


def _unary(op: str):
    return lambda x: _ptx(f"{op} {{$w0}}, {{$r0}};", write_only_types=[Float32], read_only_args=[x])


ex2 = _unary("ex2.approx.ftz.f32")
ex2_full = _unary("ex2.approx.f32")  # down to subnormal results
lg2 = _unary("lg2.approx.ftz.f32")
rcp = _unary("rcp.approx.ftz.f32")
rsqrt = _unary("rsqrt.approx.ftz.f32")
ceil = _unary("cvt.rpi.f32.f32")


def fma(a, b, c):
    return _ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def fmax(a, b):
    """The larger one; NaN if either is."""
    return _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def redux_max(x: Int32) -> Int32:
    """The largest of the warp's values."""
    return _ptx("redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[x])


def _regs(kind: str, first: int, n: int) -> str:
    return "{" + ", ".join(f"{{${kind}{i}}}" for i in range(first, first + n)) + "}"


def fresh(x: Int32) -> Int32:
    """x, as a value of which the compiler knows nothing: what is computed from it is not kept from elsewhere."""
    return _ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


# ---- pairs ---------------------------------------------------------------------------------------------------------


def pack(lo: Float32, hi: Float32, pair: str) -> Int32:
    return _ptx(f"cvt.rn.{pair}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[hi, lo])


def unpack(x: Int32, pair: str) -> tuple[Float32, Float32]:
    if pair == "bf16":
        return (x << 16).bitcast(Float32), (x & Int32(-65536)).bitcast(Float32)
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return _ptx(code, write_only_types=[Float32, Float32], read_only_args=[x])


def mul_pair(x: Int32, y: Int32, pair: str) -> Int32:
    return _ptx(f"mul.rn.{pair}x2 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[x, y])


def split(lo: Float32, hi: Float32) -> tuple[Int32, Int32]:
    """Two fp32 as a pair of bf16 and the pair of what it misses: 16 bits of mantissa together."""
    big = pack(lo, hi, "bf16")
    big_lo, big_hi = unpack(big, "bf16")
    return big, pack(lo - big_lo, hi - big_hi, "bf16")


# ---- shared memory -------------------------------------------------------------------------------------------------


def lds(addr: Int32, off: int = 0, dtype=Int32):
    return _ptx(f"ld.shared.b32 {{$w0}}, [{{$r0}}+{off}];", write_only_types=[dtype], read_only_args=[addr])


def lds_vec(addr: Int32, n: int, off: int = 0, dtype=Int32):
    kind = "f32" if dtype is Float32 else "b32"
    code = f"ld.shared.v{n}.{kind} {_regs('w', 0, n)}, [{{$r0}}+{off}];"
    return _ptx(code, write_only_types=[dtype] * n, read_only_args=[addr])


def sts(addr: Int32, x, off: int = 0) -> None:
    kind = "f32" if isinstance(x, Float32) else "b32"
    _ptx(f"st.shared.{kind} [{{$r0}}+{off}], {{$r1}};", read_only_args=[addr, x])


def sts_if(x: Int32, above: int, addr: Int32, value, off: int = 0) -> None:
    """Store where x > above."""
    kind = "f32" if isinstance(value, Float32) else "b32"
    code = f"{{ .reg .pred p; setp.gt.s32 p, {{$r2}}, {above}; @p st.shared.{kind} [{{$r0}}+{off}], {{$r1}}; }}"
    _ptx(code, read_only_args=[addr, value, x])


def sts_vec(addr: Int32, xs, off: int = 0) -> None:
    n = len(xs)
    kind = "f32" if isinstance(xs[0], Float32) else "b32"
    _ptx(f"st.shared.v{n}.{kind} [{{$r0}}+{off}], {_regs('r', 1, n)};", read_only_args=[addr, *xs])


def sts_half(addr: Int32, x: Int32, off: int = 0) -> None:
    """The lower 16 bits of x."""
    code = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {{$r1}}; st.shared.b16 [{{$r0}}+{off}], l; }}"
    _ptx(code, read_only_args=[addr, x])


def ldmatrix(addr: Int32, off: int = 0, trans: bool = False):
    """Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8."""
    name = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if trans else "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    return _ptx(f"{name} {_regs('w', 0, 4)}, [{{$r0}}+{off}];", write_only_types=[Int32] * 4, read_only_args=[addr])


def stmatrix(addr: Int32, xs, off: int = 0, trans: bool = False) -> None:
    """The reverse of ldmatrix."""
    name = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if trans else "stmatrix.sync.aligned.m8n8.x4.shared.b16"
    _ptx(f"{name} [{{$r0}}+{off}], {_regs('r', 1, 4)};", read_only_args=[addr, *xs])


# ---- global memory -------------------------------------------------------------------------------------------------


def ldg_if(x: Int32, above: int, addr, n: int = 1) -> tuple[Int32, ...]:
    """n words at addr where x > above, else zeros. For memory that nobody writes during the kernel."""
    vec, regs = ("", "{$w0}") if n == 1 else (f".v{n}", _regs("w", 0, n))
    zero = " ".join(f"@!p mov.b32 {{$w{i}}}, 0;" for i in range(n))
    code = f"{{ .reg .pred p; setp.gt.s32 p, {{$r1}}, {above}; @p ld.global.nc{vec}.b32 {regs}, [{{$r0}}]; {zero} }}"
    out = _ptx(code, write_only_types=[Int32] * n, read_only_args=[addr, x])
    return (out,) if n == 1 else out


def ldg_half_if(x: Int32, above: int, addr) -> tuple[Int32]:
    """Likewise 16 bits, in the lower half of a word: extended by the load, so that nothing waits for it here."""
    code = (f"{{ .reg .pred p; setp.gt.s32 p, {{$r1}}, {above}; mov.b32 {{$w0}}, 0; "
            "@p ld.global.nc.u16 {$w0}, [{$r0}]; }")  # fmt: skip
    return (_ptx(code, write_only_types=[Int32], read_only_args=[addr, x]),)


def copy_out(to: Int64, smem: Int32, size: int) -> None:
    """`size` bytes of shared memory to global memory, in the bulk group of this thread (9.7.9.25.4.1)."""
    _ptx(f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {size};", read_only_args=[to, smem])


def copy_in(smem: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """`size` bytes of global memory to shared memory; they count on the mbarrier."""
    code = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];"
    _ptx(code, read_only_args=[smem, source, barrier])


def store_release(at: Int64, x: Int32) -> None:
    """For every thread of the GPU that acquires it: what this thread knows to be written is written."""
    _ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[at, x])


def load_acquire(at: Int64) -> Int32:
    return _ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at])


def prefetch(at: Int64) -> None:
    """A line of global memory to L2 (9.7.9.17)."""
    _ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at])


# ---- tensor core ---------------------------------------------------------------------------------------------------


def mma(c, a, b, pair: str) -> list[Float32]:
    """c + a b of one m16n8k16 tile: c 4, a 4, b 2 registers a lane."""
    code = (f"mma.sync.aligned.m16n8k16.row.col.f32.{pair}.{pair}.f32 {_regs('w', 0, 4)}, {_regs('r', 0, 4)}, "
            f"{_regs('r', 4, 2)}, {_regs('r', 6, 4)};")  # fmt: skip
    return list(_ptx(code, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c]))
