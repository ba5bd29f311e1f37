"""Tensor memory, one warp's strips of it: 16 lanes by 64 columns of 32 bits, as the fragments of mma m16n8k16.

Value 4 n + 2 r + j of a strip, n < 8, r < 2, j < 2, is lane q / 4 + 8 r, column 8 n + 2 (q % 4) + j, where q is the
thread's number in its warp. Word 2 n + r of a packed strip (16-bit values, two a column, 32 columns) is values
4 n + 2 r and 4 n + 2 r + 1. An address is lane << 16 | column; warp w reaches lanes 32 (w % 4) to 32 (w % 4) + 31.
Source: PTX ISA, tcgen05.ld, .st (shapes .16x256b, .16x128b), .wait, .fence.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

STRIP = 16 << 16  # from a strip to the one 16 lanes on
_ptx = cute.arch.inline_ptx


def _regs(kind: str, first: int, n: int) -> str:
    return "{" + ", ".join(f"{{${kind}{i}}}" for i in range(first, first + n)) + "}"


def read(addr: Int32) -> list[Float32]:
    """The 32 values of a strip; they are there when this returns."""
    code = (f"tcgen05.ld.sync.aligned.16x256b.x8.b32 {_regs('w', 0, 32)}, [{{$r0}}];\n"
            "tcgen05.wait::ld.sync.aligned;")  # fmt: skip
    return list(_ptx(code, write_only_types=[Float32] * 32, read_only_args=[addr]))


def write(addr: Int32, words: list[Int32]) -> None:
    """The 16 words of a packed strip; complete after `written`."""
    code = f"tcgen05.st.sync.aligned.16x128b.x8.b32 [{{$r0}}], {_regs('r', 1, 16)};"
    _ptx(code, read_only_args=[addr, *words])


def written() -> None:
    """This warp's writes are done."""
    _ptx("tcgen05.wait::st.sync.aligned;")


def before_sync() -> None:
    """What this thread has read, or written, of tensor memory happens before what others do after they have
    synchronised with it."""
    _ptx("tcgen05.fence::before_thread_sync;")


def after_sync() -> None:
    """The other side of before_sync, or of a commit."""
    _ptx("tcgen05.fence::after_thread_sync;")
