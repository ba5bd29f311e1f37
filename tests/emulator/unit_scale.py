"""The smallest CuTe unit: b = a * s."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@cute.kernel
def scale_kernel(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    t, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + t
    if i < cute.size(a):
        b[i] = a[i] * s


@cute.jit
def scale(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32, stream):
    scale_kernel(a, b, s).launch(grid=((cute.size(a) + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


def build(arch):
    n = cute.sym_int()
    a, b = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2))
    return scale, (a, b, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
