"""What the recurrence warpgroups do, one wgmma group after another (state_sm90.py has equations, roles and barriers).

Issue order. A warpgroup's products run in the order given: WH first, DH before OI. What stands beside an issue runs
under it, so the serial chain h -> WH -> v' -> DH -> h has no shared-memory round trip and no output work on it:

    own chunk                                                     walked chunk
    issue WH(c)                       | narrow o(c-1) to io       issue WH(c)
    issue OH(c)                       | o(c-1) to shared memory   WH(c) done: narrow v', issue DH(c)
    WH(c) done: narrow v', issue DH(c)| OH(c) *= scale; wait      | wait for chunk c+1; fetch and widen its u
        for chunk c+1; fetch its u and decay to registers         DH(c) done: io(h), then h *= 2^G(c+1)
    issue OI(c)                       | widen u(c+1)
    DH(c) done                        | io(h) for WH(c+1), then h *= 2^G(c+1)
    OI(c) done                        | next chunk

u enters WH as the accumulator's first value, which leaves only the cast between WH and DH. A warp's shared-memory
instructions queue behind its wgmmas: hence the fetch a chunk ahead, and no wait between WH and v'. ptxas follows an
accumulator only inside one trip of the loop, hence the full wait at its end.

Layout convention. A wgmma operand is named (M or N, contraction); A is in registers, M = 64 rows of the V tile.
    operand  smem view        major      used as
    w, qg    (64 token, K)    K          B of WH, OH: contraction over K
    Aqk      (64 token, 64)   K          B of OI: N = query token i, contraction over key token j
    kg       (K, 64 token)    MN         B of DH: N = k, contraction over token; the bytes are [token, K]
    u, o     (V tile, 64)     V contig.  ldmatrix.trans / stmatrix.trans to and from the accumulator layout
All are 128-byte swizzled, one 64-column box a TMA instruction. An accumulator fragment ((2,2,N/8),1,1) and the A
fragment ((2,2,2),1,N/16) of the next product enumerate the same registers in the same order (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"), so turning one into the other is a cast. o(c) is written over u(c): the same
warp read the same elements of u before, so the slot needs no further barrier.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

CHUNK = 64
WG_V = 64  # rows of the V tile a warpgroup owns: the M of a wgmma


class Recurrence:
    """The recurrence role of KdaState."""

    @cute.jit
    def recurrence(
        self, s_w, s_qg, s_kg, s_aqk, s_u, s_decay, bars, span, h0, ht, b: Int32, hv: Int32, v0: Int32,
        scale: Float32,
    ):
        io, K = self.io, self.K
        tid = cute.arch.thread_idx()[0] % 128
        mma_token = self._mma(CHUNK, OperandMajorMode.K)  # N = tokens: WH, OH, OI
        mma_state = self._mma(K, OperandMajorMode.MN)  # N = k: DH
        thr_token, thr_state = mma_token.get_slice(tid), mma_state.get_slice(tid)
        copy_u = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), io), mma_token)
        copy_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), io), mma_token)
        # A thread's accumulator columns k are the same for each of its rows: broadcast the decay along V.
        decay_v = cute.make_layout((WG_V, K, self.u_stages), stride=(0, 1, K))
        r_h = cute.make_rmem_tensor(mma_state.partition_shape_C((WG_V, K)), Float32)
        r_wh = cute.make_rmem_tensor(mma_token.partition_shape_C((WG_V, CHUNK)), Float32)
        x = SimpleNamespace(
            mma_token=mma_token,
            mma_state=mma_state,
            b_w=mma_token.make_fragment_B(thr_token.partition_B(s_w)),
            b_qg=mma_token.make_fragment_B(thr_token.partition_B(s_qg)),
            b_aqk=mma_token.make_fragment_B(thr_token.partition_B(s_aqk)),
            b_kg=mma_state.make_fragment_B(thr_state.partition_B(s_kg)),
            r_h=r_h,
            r_hb=cute.make_rmem_tensor_like(r_h, io),
            r_v=r_wh,  # -u, then -v'
            r_vb=cute.make_rmem_tensor_like(r_wh, io),
            r_u=cute.make_rmem_tensor_like(r_wh, io),
            r_o=cute.make_rmem_tensor_like(r_wh),  # OH, then o
            r_ob=cute.make_rmem_tensor_like(r_wh, io),
            r_decay=cute.make_rmem_tensor((2, K // 8), Float32),
            copy_u=copy_u,
            copy_o=copy_o,
            c_u=copy_u.get_slice(tid).partition_S(s_u),
            c_o=copy_o.get_slice(tid).partition_D(s_u),
            c_decay=thr_state.partition_C(cute.make_tensor(s_decay.iterator, decay_v)),
            bars=bars,
            scale=scale,
        )
        coord = thr_state.partition_C(cute.make_identity_tensor((WG_V, K)))
        r_h.fill(0.0)
        if cutlass.const_expr(self.has_h0):
            if span.start == 0:
                for i in cutlass.range(cute.size(r_h), unroll_full=True):
                    r_h[i] = h0[b, hv, coord[i][1], v0 + coord[i][0]]

        stage, phase, u_stage, prev = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        self.fetch(x, u_stage)
        self.widen_u(x)
        self.narrow_state(x)
        self.decay_state(x)
        if cutlass.const_expr(self.segmented):
            for _ in cutlass.range(span.start, span.begin, unroll=1):
                stage, phase, u_stage = self.walk(x, stage, phase, u_stage)
            prev = u_stage
        stage, phase, u_stage = self.chunk(x, stage, phase, u_stage, prev, first=True)
        for _ in cutlass.range(span.begin + 1, span.end, unroll=1):
            current = u_stage
            stage, phase, u_stage = self.chunk(x, stage, phase, u_stage, prev, first=False)
            prev = current
        x.r_ob.store(x.r_o.load().to(self.io))
        self.write_output(x, prev)

        if cutlass.const_expr(self.write_ht):
            if span.end == span.chunks:
                for i in cutlass.range(cute.size(r_h), unroll_full=True):
                    ht[b, hv, coord[i][1], v0 + coord[i][0]] = r_h[i]

    @cute.jit
    def chunk(self, x, stage: Int32, phase: Int32, u_stage: Int32, prev: Int32, first: cutlass.Constexpr):
        """One chunk, but for the output, which the next call writes (`prev`: slot of the chunk before)."""
        warpgroup.fence()
        self.issue(x.mma_token, x.r_v, x.r_hb, x.b_w, stage, zero=False)  # -v' = WH - u
        if cutlass.const_expr(not first):
            x.r_ob.store(x.r_o.load().to(self.io))
            warpgroup.fence()  # OH overwrites what was read; its h is behind WH's fence
        self.issue(x.mma_token, x.r_o, x.r_hb, x.b_qg, stage, zero=True)  # OH
        if cutlass.const_expr(not first):
            self.write_output(x, prev)

        warpgroup.wait_group(1)  # WH
        x.r_vb.store(x.r_v.load().to(self.io))
        self.negate(x.r_vb)
        cute.arch.mbarrier_wait(x.bars.full_ka + stage, phase)
        warpgroup.fence()
        self.issue(x.mma_state, x.r_h, x.r_vb, x.b_kg, stage, zero=False)  # DH
        warpgroup.wait_group(1)  # OH
        self.release(x.bars.empty_wq + stage)
        x.r_o.store(x.scale * x.r_o.load())
        current = stage
        stage, phase = self.advance(stage, phase, self.stages)
        u_stage, _ = self.advance(u_stage, phase, self.u_stages)
        cute.arch.mbarrier_wait(x.bars.full + stage, phase)
        self.fetch(x, u_stage)
        warpgroup.fence()
        self.issue(x.mma_token, x.r_o, x.r_vb, x.b_aqk, current, zero=False)  # OI
        self.widen_u(x)
        warpgroup.wait_group(1)  # DH
        self.narrow_state(x)
        self.decay_state(x)
        warpgroup.wait_group(0)  # OI
        self.release(x.bars.empty_ka + current)
        return stage, phase, u_stage

    @cute.jit
    def walk(self, x, stage: Int32, phase: Int32, u_stage: Int32):
        """One chunk of which only the state is wanted: `chunk` without OH and OI, the same bits in h."""
        warpgroup.fence()
        self.issue(x.mma_token, x.r_v, x.r_hb, x.b_w, stage, zero=False)  # -v' = WH - u
        cute.arch.mbarrier_arrive(x.bars.full_o + u_stage)  # u and the decay are in registers: no o will follow
        warpgroup.wait_group(0)
        x.r_vb.store(x.r_v.load().to(self.io))
        self.negate(x.r_vb)
        cute.arch.mbarrier_wait(x.bars.full_ka + stage, phase)
        warpgroup.fence()
        self.issue(x.mma_state, x.r_h, x.r_vb, x.b_kg, stage, zero=False)  # DH
        self.release(x.bars.empty_wq + stage)
        current = stage
        stage, phase = self.advance(stage, phase, self.stages)
        u_stage, _ = self.advance(u_stage, phase, self.u_stages)
        cute.arch.mbarrier_wait(x.bars.full + stage, phase)
        self.fetch(x, u_stage)
        self.widen_u(x)
        warpgroup.wait_group(0)
        self.narrow_state(x)
        self.decay_state(x)
        self.release(x.bars.empty_ka + current)
        return stage, phase, u_stage

    @cute.jit
    def fetch(self, x, u_stage: Int32):
        """u and the decay of the chunk in this slot, to registers."""
        cute.copy(x.copy_u, x.c_u[None, None, None, u_stage], x.copy_u.retile(x.r_u))
        cute.autovec_copy(x.c_decay[(None, 0, None), 0, 0, u_stage], x.r_decay)

    @cute.jit
    def widen_u(self, x):
        """-u as the accumulator that WH adds to. bf16 is the upper half of fp32: one instruction a value."""
        self.negate(x.r_u)
        if cutlass.const_expr(self.io is cutlass.BFloat16):
            pairs = cute.recast_tensor(x.r_u, Int32)
            for i in cutlass.range_constexpr(cute.size(pairs)):
                x.r_v[2 * i], x.r_v[2 * i + 1] = cute.arch.inline_ptx(
                    "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
                    write_only_types=[Float32, Float32],
                    read_only_args=[pairs[i]],
                )
        else:
            x.r_v.store(x.r_u.load().to(Float32))
            self.hold(x.r_v)

    @cute.jit
    def narrow_state(self, x):
        x.r_hb.store(x.r_h.load().to(self.io))
        self.hold(cute.recast_tensor(x.r_hb, Int32))

    @cute.jit
    def hold(self, t: cute.Tensor):
        """Have t computed by this point. The compiler would otherwise sink the work past the waits that follow, to
        where it is used, at the head of the next chunk, while the tensor core idles. The moves vanish in ptxas."""
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

    @cute.jit
    def decay_state(self, x):
        for n in cutlass.range_constexpr(self.K // 8):
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    x.r_h[(j, r, n), 0, 0] = x.r_h[(j, r, n), 0, 0] * x.r_decay[j, n]

    @cute.jit
    def write_output(self, x, stage: Int32):
        """o over u in shared memory, then a word to STORE."""
        cute.copy(x.copy_o, x.copy_o.retile(x.r_ob), x.c_o[None, None, None, stage])
        cute.arch.mbarrier_arrive(x.bars.full_o + stage)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """One arrival for the whole warp, which the wgmma instruction before it has brought together."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    def issue(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage: Int32, zero: bool) -> None:
        """Start acc = (0 if zero else acc) + a b as one wgmma group, behind a fence for the registers of both. `a`: an
        accumulator-shaped io tensor ((2,2,N/8),1,1), whose registers are the A fragment ((2,2,2),1,N/16)."""
        n = cute.size(a) // 8
        a = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, n), stride=((1, 2, 4), 0, 8)))
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero)
        for k in range(n):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k, stage], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
