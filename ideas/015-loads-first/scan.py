"""The role SCAN: recurrence and output, chunk after chunk, from PREP's operands (equations: kda_sm90.py)."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from . import ptx
from .tiles import CHUNK, INFINITE, SLOTS, TILE, WG_V


class Scan:
    """SCAN of KdaForward."""

    def _mma(self, n: int, b_major: OperandMajorMode) -> cute.TiledMma:
        """m64 x n x k16, A from registers, B from shared memory, fp32 accumulator."""
        op = warpgroup.MmaF16BF16Op(
            self.io, Float32, (64, n, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    @cute.jit
    def scan(self, s, s_v, v, o, bars, at, piece, group: Int32):
        """A piece of a strip (Helpers.row_piece): from h0 or zero if its first chunk is the strip's, else from zero; h to ht
        if its last is the strip's. s: shared tensors by name; s_v: of v and o, for this warpgroup's 64 columns; v, o: TMA.
        Returns what of it the CTA tells (Shares.note)."""
        io, K, h0, ht, b, hv, block = self.io, self.K, at.h0, at.ht, piece.b, piece.hv, piece.u * self.groups + group
        s_v = cute.local_tile(s_v, (WG_V, CHUNK), (group, 0, None))
        v, o = (self.tma(*tma, s_v, (WG_V, CHUNK), (block, None, hv, b)) for tma in (v, o))
        v0 = block * WG_V
        tid = cute.arch.thread_idx()[0] % 128
        mma_token = self._mma(CHUNK, OperandMajorMode.K)  # N = tokens: R
        mma_half = self._mma(CHUNK // 2, OperandMajorMode.K)  # N = tokens of one half: A, O
        mma_state = self._mma(K, OperandMajorMode.MN)  # N = k: DH
        thr_token, thr_half, thr_state = (m.get_slice(tid) for m in (mma_token, mma_half, mma_state))
        copy_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), io), mma_token)
        copy_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), io), mma_token)
        # A thread's accumulator columns are the same for each of its rows: broadcast beta and the decay along V.
        beta_v = cute.make_layout((WG_V, CHUNK, SLOTS), stride=(0, 1, CHUNK))
        decay_v = cute.make_layout((WG_V, K, SLOTS), stride=(0, 1, K))
        r_h = cute.make_rmem_tensor(mma_state.partition_shape_C((WG_V, K)), Float32)
        tokens = cute.make_rmem_tensor(mma_token.partition_shape_C((WG_V, CHUNK)), Float32)
        x = SimpleNamespace(
            mma_token=mma_token,
            mma_half=mma_half,
            mma_state=mma_state,
            b_k=mma_token.make_fragment_B(thr_token.partition_B(s.kf)),
            b_q=mma_half.make_fragment_B(thr_half.partition_B(s.qg)),
            b_aqk=mma_half.make_fragment_B(thr_half.partition_B(s.aqk)),
            b_inverse=mma_half.make_fragment_B(thr_half.partition_B(s.inverse)),
            b_kg=mma_state.make_fragment_B(thr_state.partition_B(s.kg)),
            r_h=r_h,
            r_hb=cute.make_rmem_tensor_like(r_h, io),
            r_r=tokens,  # -v, -r, -beta r
            # v', o. One for each half: ptxas takes the two halves' scaled outputs, of the same registers, for one value.
            r_half=[cute.make_rmem_tensor(mma_half.partition_shape_C((WG_V, CHUNK // 2)), Float32) for _ in range(2)],
            r_rb=cute.make_rmem_tensor_like(tokens, io),  # v, then -beta r, then o
            r_vb=cute.make_rmem_tensor_like(tokens, io),  # v'
            copy_v=copy_v,
            copy_o=copy_o,
            c_v=copy_v.get_slice(tid).partition_S(s_v),
            c_o=copy_o.get_slice(tid).partition_D(s_v),
            c_decay=thr_state.partition_C(cute.make_tensor(s.decay.iterator, decay_v)),
            c_beta=thr_token.partition_C(cute.make_tensor(s.beta.iterator, beta_v)),
            bars=bars,
            scale=at.scale,
            warp=cute.arch.make_warp_uniform(tid // 32),
            group=group,
            value=bars.value + group * SLOTS,
            out=piece.out,
            stop=piece.stop,
        )
        coord = thr_state.partition_C(cute.make_identity_tensor((WG_V, K)))
        r_h.fill(0.0)
        if cutlass.const_expr(self.has_h0):
            if piece.first == 0:
                for i in cutlass.range(cute.size(r_h), unroll_full=True):
                    r_h[i] = h0[b, hv, coord[i][1], v0 + coord[i][0]]

        slot, phase = piece.n % SLOTS, (piece.n // SLOTS) & 1
        self.load_values(x, v, piece.first, slot)
        self.narrow_state(x)
        cute.arch.mbarrier_wait(bars.ready + slot, phase)
        self.scale_columns(r_h, x.c_decay[None, 0, 0, slot])
        dropped, least = Int32(0), Int32(INFINITE)
        for c in cutlass.range(piece.first, piece.stop, unroll=1):
            self.scan_chunk(x, v, o, c, slot, phase)
            slot, phase = self.advance(slot, phase)
            if cutlass.const_expr(self.tells):
                dropped, least = self.note(self.peak(x), c, piece, dropped, least)

        if piece.stop == piece.chunks:
            last = mma_state.get_slice(ptx.fresh(tid)).partition_C(cute.make_identity_tensor((WG_V, K)))
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                ht[b, hv, last[i][1], v0 + last[i][0]] = r_h[i]
        return dropped, least

    @cute.jit
    def scan_chunk(self, x, v, o, c: Int32, slot: Int32, phase: Int32):
        """Chunk c, whose operands are ready, onto the state, which bears c's decay already (x.r_hb does not)."""
        cute.arch.mbarrier_wait(x.value + slot, phase)
        cute.copy(x.copy_v, x.c_v[None, None, None, slot], x.copy_v.retile(x.r_rb))
        self.negate(x.r_rb)
        x.r_r.store(x.r_rb.load().to(Float32))
        self.issue(x.mma_token, x.r_r, x.r_hb, x.b_k[None, 0, None, slot])  # R: -v + h kG
        self.load_values(x, v, c + 1, slot ^ 1)
        warpgroup.wait_group(0)
        self.scale_columns(x.r_r, x.c_beta[None, 0, 0, slot])
        x.r_rb.store(x.r_r.load().to(self.io))
        for half in cutlass.range_constexpr(2):  # A: (-beta r) (-A), whose upper right quarter is zero
            acc = x.r_half[0]
            self.issue(x.mma_half, acc, x.r_rb, x.b_inverse[None, half, None, slot], zero=True, steps=2 + 2 * half)
            warpgroup.wait_group(0)
            self.put_half(x.r_vb, half, acc.load())
        self.issue(x.mma_state, x.r_h, x.r_vb, x.b_kg[None, 0, None, slot])  # DH
        for half in cutlass.range_constexpr(2):  # O: from the state, from the chunk
            acc = x.r_half[half]
            self.issue(x.mma_half, acc, x.r_hb, x.b_q[None, half, None, slot], zero=True)
            self.issue(x.mma_half, acc, x.r_vb, x.b_aqk[None, half, None, slot], steps=2 + 2 * half)
            warpgroup.wait_group(0)
            self.put_half(x.r_rb, half, x.scale * acc.load())
            if half == 1:
                cute.arch.mbarrier_arrive(x.bars.free + slot)
            self.put_output(x, half, slot)
        self.write_output(x, o, c, slot)
        self.narrow_state(x)
        if c + 1 < x.stop:
            slot, phase = self.advance(slot, phase)
            cute.arch.mbarrier_wait(x.bars.ready + slot, phase)
            self.scale_columns(x.r_h, x.c_decay[None, 0, 0, slot])

    @cute.jit
    def load_values(self, x, v, c: Int32, slot: Int32):
        """v of chunk c, once o of the chunk two before it has left the slot."""
        if c < x.stop:
            if x.warp == 0:
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive_and_expect_tx(x.value + slot, TILE)
                cute.copy(v.atom, v.gmem[None, c], v.smem[None, slot], tma_bar_ptr=x.value + slot)

    def put_output(self, x, half: int, slot: Int32) -> None:
        """o of one half over v in shared memory. At once: kept until the other half is done, it would spill."""
        registers = x.copy_o.retile(x.r_rb)
        for n in range(2 * half, 2 * half + 2):
            cute.copy(x.copy_o, registers[(None, n), None, 0], x.c_o[(None, n), None, 0, slot])

    @cute.jit
    def write_output(self, x, o, c: Int32, slot: Int32):
        """o, which lies over v in shared memory, off, unless the chunk is walked for its state only."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=3 + x.group, number_of_threads=128)
        if (x.warp == 0) & (c >= x.out):
            with cute.arch.elect_one():
                cute.copy(o.atom, o.smem[None, slot], o.gmem[None, c])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def narrow_state(self, x):
        x.r_hb.store(x.r_h.load().to(self.io))
        self.hold(cute.recast_tensor(x.r_hb, Int32))

    def peak(self, x) -> Int32:
        """The warp's largest |io(h)|, as bits: their order is that of the magnitudes, infinities and NaN above all."""
        pairs = cute.recast_tensor(x.r_hb, Int32)
        low, high = pairs[0] & 0x7FFF, pairs[0] & 0x7FFF0000
        for i in range(1, cute.size(pairs)):
            low, high = cutlass.max(low, pairs[i] & 0x7FFF), cutlass.max(high, pairs[i] & 0x7FFF0000)
        return ptx.redux_max(cutlass.max(low, high >> 16))

    @cute.jit
    def hold(self, t: cute.Tensor):
        """Have t computed by this point: ptxas follows an accumulator only inside one trip of the loop. The moves
        vanish in ptxas."""
        for i in cutlass.range_constexpr(cute.size(t)):
            t[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[t.element_type], read_only_args=[t[i]]
            )

    @cute.jit
    def negate(self, t: cute.Tensor):
        """Flip the signs of an io tensor, two at a time."""
        pairs = cute.recast_tensor(t, Int32)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pairs[i] = pairs[i] ^ Int32(-0x7FFF8000)

    def scale_columns(self, acc: cute.Tensor, factors: cute.Tensor) -> None:
        """acc times a factor per column, in place."""
        for n in range(cute.size(acc) // 4):
            for j in range(2):
                factor = factors[((j, 0, n),)]
                for r in range(2):
                    acc[(j, r, n), 0, 0] = acc[(j, r, n), 0, 0] * factor

    def put_half(self, out: cute.Tensor, half: int, values) -> None:
        """The 32 tokens of one half into an io tensor of 64."""
        n = cute.size(out) // 2
        part = cute.make_tensor(out.iterator + half * n, cute.make_layout(n))
        part.store(values.to(self.io).reshape((n,)))

    def issue(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: bool = False, steps: int = 0) -> None:
        """Start acc = (0 if zero else acc) + a b as one wgmma group, over the contraction's first `steps` times 16 (0:
        all). `a`: an accumulator-shaped io tensor ((2,2,N/8),1,1), whose registers are the A fragment ((2,2,2),1,N/16).
        b: (B fragment, k step) of one tile of the smem operand."""
        n = cute.size(a) // 8
        a = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, n), stride=((1, 2, 4), 0, 8)))
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero)
        warpgroup.fence()
        for k in range(steps or n):
            part = b[None, k]
            part = cute.make_tensor(part.iterator, cute.append(part.layout, cute.make_layout(1), up_to_rank=2))
            cute.gemm(atom, acc, a[None, None, k], part, acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
