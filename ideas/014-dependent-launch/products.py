"""Phase F of the preparation kernel: w and u, the inverse times 64 columns of keys or values (prep.py).

Beta stands in the columns of the inverse, whose diagonal is therefore beta itself: rounded to io once, it would bend a
whole row of w and u one way, and identical roundings do not cancel. Hence the diagonal blocks come in two parts; the
low ones go in first, by mma.sync, whose accumulator is laid out as that of wgmma. Below them one part does: roundings
there differ from column to column.

On Hopper the inverse's four k steps are wgmma m64n64k16, elsewhere mma.sync m16n8k16.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from . import ptx
from .tiles import BLOCK, CHUNK, ROW, TILE, swizzled


class Products:
    """Phase F of KdaPrep. A warp's accumulator is 16 rows by 64 columns; register 4 n + 2 half + r of a lane is row
    lane / 4 + 8 half, column 8 n + 2 (lane % 4) + r (PTX ISA, register fragments of m16n8k16 and m64nNk16)."""

    def product_operands(self, x, kv) -> SimpleNamespace:
        """What `product` wants of every tile. kv: the tiles over k and v in shared memory."""
        lane = ptx.fresh(x.lane)
        row = x.k + ((x.warp & 3) * BLOCK + (lane & 15)) * ROW
        p = SimpleNamespace(
            block=x.warp & 3,
            a=self.load_inverse(x),
            rest=self.load_rest(x),
            rows=[row + off for off in swizzled(lane)],  # of the first tile, the warp's own, as ldmatrix wants them
            acc=cute.make_rmem_tensor(cute.make_layout(((2, 2, 8), 1, 1)), Float32),
        )
        if self.warpgroups:
            op = warpgroup.MmaF16BF16Op(
                self.io, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
            )
            mma = cute.make_tiled_mma(cute.make_mma_atom(op))
            # the bytes of the tiles seen as (64 columns, 64 tokens, tile)
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.io)
            columns = cute.tile_to_shape(atom, (64, CHUNK, self.tiles), order=(1, 0, 2))
            b = kv.get_tensor(columns.outer, swizzle=columns.inner)
            p.op, p.b = op, mma.make_fragment_B(mma.get_slice(x.tid % 128).partition_B(b))
        return p

    def load_inverse(self, x) -> cute.Tensor:
        """A diag(beta) as A fragments of four k steps: the warp's 16 rows, zero right of the diagonal block."""
        lane, block = x.lane, x.warp & 3
        a = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8)), self.io)
        words = self.words(a)
        row, piece = (lane & 7) + ((lane >> 4) & 1) * 8, 2 * block + ((lane >> 3) & 1)
        at = x.kd + TILE + row * ROW + ((piece ^ (lane & 7)) << 4)
        for kk in range(4):
            # blocks right of the diagonal were never written: read the diagonal one again
            regs = ptx.ldmatrix(at + cutlass.min(block, kk) * (BLOCK * ROW), trans=True)
            for r in range(4):
                words[4 * kk + r] = select_(block >= kk, regs[r], Int32(0))
        return a

    def words(self, a: cute.Tensor) -> cute.Tensor:
        """The 16 registers of the four fragments."""
        return cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(32)), Int32)

    def load_rest(self, x) -> tuple[Int32, ...]:
        """What rounding took from the warp's diagonal block of A diag(beta), as an A fragment."""
        lane = ptx.fresh(x.lane)
        row, piece = (lane & 7) + ((lane >> 4) & 1) * 8, (lane >> 3) & 1
        return ptx.ldmatrix(x.diagonal + ((4 * (x.warp & 3) + piece) * BLOCK + row) * 16, trans=True)

    def product(self, p, tile: Int32) -> None:
        """acc = A diag(beta) times a tile of 64 columns."""
        p.acc.fill(0.0)
        self.add_block(p, p.rest, tile * TILE)
        if self.warpgroups:
            atom = cute.make_mma_atom(p.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.fence()
            for kk in range(4):
                cute.gemm(atom, p.acc, p.a[None, None, kk], p.b[None, None, kk, tile], p.acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        else:
            words = self.words(p.a)
            for kk in range(4):
                there = tile * TILE + (kk - p.block) * (BLOCK * ROW)
                self.add_block(p, [words[4 * kk + r] for r in range(4)], there)

    def add_block(self, p, a, off: Int32) -> None:
        """acc += an A fragment (16 x 16) times the 16 rows that lie `off` bytes from the warp's own of the first tile."""
        for n in range(0, 8, 2):
            b = ptx.ldmatrix(p.rows[n // 2] + off, trans=True)
            for h in range(2):
                at = range(4 * (n + h), 4 * (n + h) + 4)
                for r, value in zip(at, ptx.mma([p.acc[r] for r in at], a, (b[2 * h], b[2 * h + 1]), self.pair)):
                    p.acc[r] = value

    def put_output(self, p, tile: Int32) -> None:
        """The accumulator over the rows of the tile that it was made from."""
        for n in range(0, 8, 2):
            words = [ptx.pack(p.acc[4 * n + 2 * i], p.acc[4 * n + 2 * i + 1], self.pair) for i in range(4)]
            ptx.stmatrix(p.rows[n // 2] + tile * TILE, words)
