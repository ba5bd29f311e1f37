"""KDA state scan and output in one kernel, Hopper (sm_90a), warp-specialised: 002's math, every unit kept busy.

One CTA walks all chunks of one (batch b, value head hv, V tile of 64 or 128). Each recurrence warpgroup owns 64 rows of
the transposed state h^T [V tile, K], fp32, in registers, and shares the input tiles of w, qg, kg, Aqk with its sibling.

Per chunk of 64 tokens (^T marks what the registers hold; io = bf16 or fp16; accumulation is fp32):

    product  equation                      as issued                                rounding
    WH       WH  = w h                     -v'^T = -u^T + io(h^T) w^T               h to io
    OH       OH  = qg h                    OH^T  = io(h^T) qg^T                     h to io (the same copy)
    (v')     v'  = u - WH                  v'^T  = -io(-v'^T)                       v' to io
    DH       h_k = 2^G_k h_k + (kg^T v')_k h^T   = h^T diag(2^G) + v'^T kg          none: h stays fp32
    OI       o   = scale OH + Aqk v'       o^T   = scale OH^T + v'^T Aqk^T          o to io at the store

G is g2 at the chunk's last row, min(64 c + 63, T - 1), in log2 units. h_0 is `h0` or zero; after the last chunk h is
written to `ht`. Where T is no multiple of 64 TMA fills rows past T with zeros (v' = 0 there) and clips them in o.
Aqk must be finite on the whole tile and zero above the diagonal: the product contracts all of it.

Issue order. A warpgroup's products run in the order given: WH first, DH before OI. What stands beside an issue runs
under it, so the serial chain h -> WH -> v' -> DH -> h has no shared-memory round trip and no output work on it:

    issue WH(c)                       | narrow o(c-1) to io
    issue OH(c)                       | o(c-1) to shared memory
    WH(c) done: narrow v', issue DH(c)| OH(c) *= scale; wait for chunk c+1; fetch its u and decay to registers
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

    warps            role        does                                       registers
    0                LOAD        TMA: w qg | g2 row, u | kg Aqk             40 (setmaxnreg; warp 3 idles)
    1                DECAY       2^G, once a chunk instead of once a thread
    2                STORE       TMA: o
    4-7 (and 8-11)   RECURRENCE  every product; h^T, v'^T, o^T              240 (232 with two warpgroups)

    MMA (M = 64, A from registers): WH, OH m64n64k16 x K/16 each; DH m64nKk16 x 4; OI m64n64k16 x 4

    mbarrier   ring  count            arrives                              waits
    full       in    2 + bytes + 32   LOAD (w qg; u), DECAY (32 lanes)     RECURRENCE before it fetches
    empty_wq   in    warps            RECURRENCE, a lane a warp, OH done   LOAD
    full_ka    in    1 + bytes        LOAD                                 RECURRENCE before DH
    empty_ka   in    warps            RECURRENCE, a lane a warp, OI done   LOAD
    full_g     u     1 + bytes        LOAD                                 DECAY
    full_o     u     32 warps         RECURRENCE, every lane               STORE; DECAY before it writes again
    empty_u    u     1                STORE, once o has left the slot      LOAD (covers g2 row, u, o)
    warps = 4 a recurrence warpgroup. `bar.sync 0` only once, after the barriers' initialisation. The async-proxy fence
    between stmatrix and the TMA store stands in STORE, after its wait: the fence may be anywhere on the path (PTX ISA,
    "Causality Order": proxy-preserved base causality order), and there it delays no product.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

CHUNK = 64
WG_V = 64  # rows of the V tile a warpgroup owns: the M of a wgmma
IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Role(enum.IntEnum):
    """Warp index of each single-warp role; every warp from RECURRENCE on belongs to a recurrence warpgroup."""

    LOAD = 0
    DECAY = 1
    STORE = 2
    RECURRENCE = 4


STAGES = {64: (3, 4), 128: (2, 4)}  # by V tile: slots of the rings `in` (w qg kg Aqk), `u` (u, o, g2, decay)
IN_BARRIERS = ("full", "empty_wq", "full_ka", "empty_ka")
U_BARRIERS = ("full_g", "full_o", "empty_u")


class KdaState:
    """The jit function of one static configuration (see `build`)."""

    def __init__(self, K: int, V: int, dtype: str, has_h0: bool, write_ht: bool, v_tile: int):
        if K not in (64, 128):
            raise ValueError(f"K: got {K}, accepted 64 or 128")
        if v_tile not in (64, 128):
            raise ValueError(f"v_tile: got {v_tile}, accepted 64 or 128")
        if V <= 0 or V % v_tile:
            raise ValueError(f"V: got {V}, accepted a positive multiple of v_tile = {v_tile}")
        if dtype not in IO:
            raise ValueError(f"dtype: got {dtype}, accepted {' or '.join(IO)}")
        self.K, self.V, self.io, self.has_h0, self.write_ht = K, V, IO[dtype], has_h0, write_ht
        self.v_tile = v_tile
        self.stages, self.u_stages = STAGES[v_tile]
        self.groups = v_tile // WG_V
        self.threads = 32 * (Role.RECURRENCE + 4 * self.groups)
        self.regs_recurrence, self.regs_other = (240, 40) if self.groups == 1 else (232, 40)

    # ---- static configuration, rebuilt identically on the host and in the kernel ----------------------------------

    def _mma(self, n: int, b_major: OperandMajorMode) -> cute.TiledMma:
        """m64 x n x k16, A from registers, B from shared memory, fp32 accumulator."""
        op = warpgroup.MmaF16BF16Op(
            self.io, Float32, (64, n, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def _smem(self, rows: int, cols: int, stages: int, row_contiguous: bool) -> cute.ComposedLayout:
        """128-byte swizzled (rows, cols, stages); `row_contiguous`: neighbours along a column are adjacent."""
        kind = warpgroup.SmemLayoutAtomKind.MN_SW128 if row_contiguous else warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.io)
        order = (1, 0, 2) if row_contiguous else (0, 1, 2)
        return cute.tile_to_shape(atom, (rows, cols, stages), order=order)

    def _layouts(self) -> SimpleNamespace:
        w = self._smem(CHUNK, self.K, self.stages, False)
        return SimpleNamespace(
            w=w,
            qg=w,
            kg=self._smem(self.K, CHUNK, self.stages, True),
            aqk=self._smem(CHUNK, CHUNK, self.stages, False),
            u=self._smem(self.v_tile, CHUNK, self.u_stages, True),
            g=cute.make_layout((self.K, 1, self.u_stages), stride=(1, self.K, self.K)),
        )

    # ---- host ------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        qg: cute.Tensor,  # [B, T, HV, K] io: q 2^g2
        w: cute.Tensor,  # [B, T, HV, K] io
        kg: cute.Tensor,  # [B, T, HV, K] io: k 2^(g2_last - g2)
        u: cute.Tensor,  # [B, T, HV, V] io
        aqk: cute.Tensor,  # [B, T, HV, 64] io, scale folded in, zero above the diagonal
        g2: cute.Tensor,  # [B, T, HV, K] fp32, chunk-local cumulative log decay, log2 units
        h0: cute.Tensor | None,  # [B, HV, K, V] fp32, or None without has_h0
        o: cute.Tensor,  # [B, T, HV, V] io, written
        ht: cute.Tensor | None,  # [B, HV, K, V] fp32, written, or None without write_ht
        scale: Float32,
        stream,
    ):
        io, K, VT = self.io, self.K, self.v_tile
        lay = self._layouts()

        def one(layout):
            return cute.slice_(layout, (None, None, 0))

        def rows(x):  # [B, T, HV, D] seen as (T, D, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))

        def columns(x):  # [B, T, HV, D] seen as (D, T, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 1, 2, 0]))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_qg, m_qg = cpasync.make_tiled_tma_atom(load, rows(qg), one(lay.qg), (CHUNK, K))
        tma_w, m_w = cpasync.make_tiled_tma_atom(load, rows(w), one(lay.w), (CHUNK, K))
        tma_kg, m_kg = cpasync.make_tiled_tma_atom(load, columns(kg), one(lay.kg), (K, CHUNK))
        tma_aqk, m_aqk = cpasync.make_tiled_tma_atom(load, rows(aqk), one(lay.aqk), (CHUNK, CHUNK))
        tma_u, m_u = cpasync.make_tiled_tma_atom(load, columns(u), one(lay.u), (VT, CHUNK))
        tma_g, m_g = cpasync.make_tiled_tma_atom(load, columns(g2), one(lay.g), (K, 1))
        tma_o, m_o = cpasync.make_tiled_tma_atom(store, columns(o), one(lay.u), (VT, CHUNK))
        self.bytes_wq = 2 * cute.size_in_bytes(io, one(lay.w))
        self.bytes_ka = cute.size_in_bytes(io, one(lay.kg)) + cute.size_in_bytes(io, one(lay.aqk))
        self.bytes_u = cute.size_in_bytes(io, one(lay.u))
        self.bytes_g = cute.size_in_bytes(Float32, one(lay.g))

        def tile(layout, dtype=io):
            return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[
                Int64, len(IN_BARRIERS) * self.stages + len(U_BARRIERS) * self.u_stages
            ]
            w: tile(lay.w)
            qg: tile(lay.qg)
            kg: tile(lay.kg)
            aqk: tile(lay.aqk)
            u: tile(lay.u)
            g: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(lay.g)], 128]
            decay: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(lay.g)], 128]

        self.storage = SharedStorage
        B, HV = qg.shape[0], qg.shape[2]
        self.kda_state(
            tma_qg, m_qg, tma_w, m_w, tma_kg, m_kg, tma_aqk, m_aqk, tma_u, m_u, tma_g, m_g, tma_o, m_o, h0, ht, scale
        ).launch(
            grid=(B * HV * (self.V // VT), 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    # ---- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kda_state(
        self,
        tma_qg: cute.CopyAtom,
        m_qg: cute.Tensor,
        tma_w: cute.CopyAtom,
        m_w: cute.Tensor,
        tma_kg: cute.CopyAtom,
        m_kg: cute.Tensor,
        tma_aqk: cute.CopyAtom,
        m_aqk: cute.Tensor,
        tma_u: cute.CopyAtom,
        m_u: cute.Tensor,
        tma_g: cute.CopyAtom,
        m_g: cute.Tensor,
        tma_o: cute.CopyAtom,
        m_o: cute.Tensor,
        h0: cute.Tensor | None,
        ht: cute.Tensor | None,
        scale: Float32,
    ):
        K, VT = self.K, self.v_tile
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bid, _, _ = cute.arch.block_idx()
        T, HV, n_v = cute.size(m_u, mode=[1]), cute.size(m_u, mode=[2]), self.V // VT
        v_id, hv, b = bid % n_v, (bid // n_v) % HV, bid // (n_v * HV)
        chunks = cute.ceil_div(T, CHUNK)

        # -- shared memory ---------------------------------------------------------------------------------------
        lay = self._layouts()
        smem = SmemAllocator().allocate(self.storage)
        s_w = smem.w.get_tensor(lay.w.outer, swizzle=lay.w.inner)
        s_qg = smem.qg.get_tensor(lay.qg.outer, swizzle=lay.qg.inner)
        s_kg = smem.kg.get_tensor(lay.kg.outer, swizzle=lay.kg.inner)
        s_aqk = smem.aqk.get_tensor(lay.aqk.outer, swizzle=lay.aqk.inner)
        s_u = smem.u.get_tensor(lay.u.outer, swizzle=lay.u.inner)
        s_g = smem.g.get_tensor(lay.g)
        s_decay = smem.decay.get_tensor(lay.g)
        base = smem.barriers.data_ptr()
        base_u = base + len(IN_BARRIERS) * self.stages
        bars = SimpleNamespace(
            **{name: base + i * self.stages for i, name in enumerate(IN_BARRIERS)},
            **{name: base_u + i * self.u_stages for i, name in enumerate(U_BARRIERS)},
        )
        self.init_barriers(bars, warp_id)

        # -- the tiles of this CTA, one column a chunk -------------------------------------------------------------
        def tma(atom, tensor, smem_tile, shape, coord):
            g = cute.local_tile(tensor, shape, coord)
            s, g = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(smem_tile, 0, 2), cute.group_modes(g, 0, 2)
            )
            return SimpleNamespace(atom=atom, smem=s, gmem=g)

        if warp_id == Role.LOAD:
            cute.arch.setmaxregister_decrease(self.regs_other)
            self.load(
                tma(tma_w, m_w, s_w, (CHUNK, K), (None, 0, hv, b)),
                tma(tma_qg, m_qg, s_qg, (CHUNK, K), (None, 0, hv, b)),
                tma(tma_kg, m_kg, s_kg, (K, CHUNK), (0, None, hv, b)),
                tma(tma_aqk, m_aqk, s_aqk, (CHUNK, CHUNK), (None, 0, hv, b)),
                tma(tma_u, m_u, s_u, (VT, CHUNK), (v_id, None, hv, b)),
                tma(tma_g, m_g, s_g, (K, 1), (0, None, hv, b)),
                bars,
                chunks,
                T,
            )
        elif warp_id == Role.DECAY:
            cute.arch.setmaxregister_decrease(self.regs_other)
            self.decay(s_g, s_decay, bars, chunks)
        elif warp_id == Role.STORE:
            cute.arch.setmaxregister_decrease(self.regs_other)
            self.store(tma(tma_o, m_o, s_u, (VT, CHUNK), (v_id, None, hv, b)), bars, chunks)
        elif warp_id < Role.RECURRENCE:
            cute.arch.setmaxregister_decrease(self.regs_other)
        else:
            cute.arch.setmaxregister_increase(self.regs_recurrence)
            group = (warp_id - Role.RECURRENCE) // 4
            v0 = v_id * VT + group * WG_V
            s_u_wg = cute.local_tile(s_u, (WG_V, CHUNK), (group, 0, None))
            self.recurrence(s_w, s_qg, s_kg, s_aqk, s_u_wg, s_decay, bars, chunks, h0, ht, b, hv, v0, scale)

    @cute.jit
    def init_barriers(self, bars, warp_id: Int32):
        warps = 4 * self.groups
        counts = dict(full=2 + 32, empty_wq=warps, full_ka=1, empty_ka=warps, full_g=1, full_o=32 * warps, empty_u=1)
        if warp_id == 0:
            with cute.arch.elect_one():
                self.init_ring(bars, IN_BARRIERS, self.stages, counts)
                self.init_ring(bars, U_BARRIERS, self.u_stages, counts)
        # TMA, too, uses an mbarrier through the generic proxy (PTX ISA, cp.async.bulk.tensor): this hands it to all
        cute.arch.sync_threads()

    def init_ring(self, bars, names, stages: int, counts):
        for name in names:
            for s in range(stages):
                cute.arch.mbarrier_init(getattr(bars, name) + s, counts[name])

    @cute.jit
    def advance(self, stage: Int32, phase: Int32, stages: cutlass.Constexpr):
        """The next (stage, phase) of a ring."""
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    # ---- roles -----------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, w, qg, kg, aqk, u, g, bars, chunks: Int32, T: Int32):
        """A chunk more than there is: RECURRENCE fetches one ahead, and past T TMA writes zeros, reading nothing."""
        stage, phase, u_stage, u_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for c in cutlass.range(chunks + 1, unroll=1):
            full, full_ka, full_g = bars.full + stage, bars.full_ka + stage, bars.full_g + u_stage
            self.fill(bars.empty_wq + stage, full, self.bytes_wq, phase)
            cute.copy(w.atom, w.gmem[None, c], w.smem[None, stage], tma_bar_ptr=full)
            cute.copy(qg.atom, qg.gmem[None, c], qg.smem[None, stage], tma_bar_ptr=full)

            self.fill(bars.empty_u + u_stage, full, self.bytes_u, u_phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_g, self.bytes_g)
            last = cutlass.min(c * CHUNK + (CHUNK - 1), T - 1)
            if c == chunks:
                last = T  # out of bounds: zero, so a decay of 1
            cute.copy(g.atom, g.gmem[None, last], g.smem[None, u_stage], tma_bar_ptr=full_g)
            cute.copy(u.atom, u.gmem[None, c], u.smem[None, u_stage], tma_bar_ptr=full)

            if c < chunks:
                self.fill(bars.empty_ka + stage, full_ka, self.bytes_ka, phase)
                cute.copy(kg.atom, kg.gmem[None, c], kg.smem[None, stage], tma_bar_ptr=full_ka)
                cute.copy(aqk.atom, aqk.gmem[None, c], aqk.smem[None, stage], tma_bar_ptr=full_ka)
            stage, phase = self.advance(stage, phase, self.stages)
            u_stage, u_phase = self.advance(u_stage, u_phase, self.u_stages)

    @cute.jit
    def fill(self, empty: cute.Pointer, full: cute.Pointer, bytes: cutlass.Constexpr, phase: Int32):
        """Wait until the slot is free (at once on the first lap), then announce what TMA will write to it."""
        cute.arch.mbarrier_wait(empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, bytes)

    @cute.jit
    def decay(self, s_g: cute.Tensor, s_decay: cute.Tensor, bars, chunks: Int32):
        """decay = 2^G, in the slot of the row it comes from.

        full_g comes after empty_u, which comes after full_o, so the first wait never blocks. It names the readers'
        own arrivals as what frees the slot; racecheck follows no chain through other roles and TMA."""
        lane = cute.arch.lane_idx()
        stage, phase, u_stage, u_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for _ in cutlass.range(chunks + 1, unroll=1):
            cute.arch.mbarrier_wait(bars.full_o + u_stage, u_phase ^ 1)  # RECURRENCE has read the decay before
            cute.arch.mbarrier_wait(bars.full_g + u_stage, u_phase)
            for i in cutlass.range_constexpr(self.K // 32):
                k = i * 32 + lane
                s_decay[k, 0, u_stage] = cute.math.exp2(s_g[k, 0, u_stage], fastmath=True)
            cute.arch.mbarrier_arrive(bars.full + stage)
            stage, phase = self.advance(stage, phase, self.stages)
            u_stage, u_phase = self.advance(u_stage, u_phase, self.u_stages)

    @cute.jit
    def store(self, o, bars, chunks: Int32):
        stage, phase = Int32(0), Int32(0)
        for c in cutlass.range(chunks, unroll=1):
            cute.arch.mbarrier_wait(bars.full_o + stage, phase)
            cute.arch.fence_proxy("async.shared", space="cta")
            with cute.arch.elect_one():
                cute.copy(o.atom, o.smem[None, stage], o.gmem[None, c])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(bars.empty_u + stage)
            stage, phase = self.advance(stage, phase, self.u_stages)

    @cute.jit
    def recurrence(
        self, s_w, s_qg, s_kg, s_aqk, s_u, s_decay, bars, chunks: Int32, h0, ht, b: Int32, hv: Int32, v0: Int32,
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
        if cutlass.const_expr(self.has_h0):
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                r_h[i] = h0[b, hv, coord[i][1], v0 + coord[i][0]]
        else:
            r_h.fill(0.0)

        stage, phase, u_stage, prev = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        self.fetch(x, u_stage)
        self.widen_u(x)
        self.narrow_state(x)
        self.decay_state(x)
        stage, phase, u_stage = self.chunk(x, stage, phase, u_stage, prev, first=True)
        for _ in cutlass.range(1, chunks, unroll=1):
            current = u_stage
            stage, phase, u_stage = self.chunk(x, stage, phase, u_stage, prev, first=False)
            prev = current
        x.r_ob.store(x.r_o.load().to(self.io))
        self.write_output(x, prev)

        if cutlass.const_expr(self.write_ht):
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
        """One arrival for the whole warp, which the wgmma.wait_group.sync before it has brought together."""
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


KdaState.kda_state.set_name_prefix("kda_state", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(arch: str, K: int, V: int, dtype: str = "bfloat16", has_h0: bool = True, write_ht: bool = True,
          v_tile: int = 64):  # fmt: skip
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_90a") with TVM-FFI.

    v_tile: V columns a CTA walks. 128 (two warpgroups) moves the fewest bytes; 64 gives twice the CTAs, and is faster
    while those fit the GPU's SMs. Arguments of the compiled function, all contiguous: qg, w, kg [B,T,HV,K],
    u [B,T,HV,V], Aqk [B,T,HV,64] in `dtype`; g2 [B,T,HV,K] fp32 (log2 units); h0 [B,HV,K,V] fp32 or None (has_h0
    false); o [B,T,HV,V] in `dtype`; ht like h0 or None (write_ht false); scale fp32. B, T, HV are free.
    ValueError: a parameter outside its domain.
    """
    if arch != "sm_90a":
        raise ValueError(f"arch: got {arch}, accepted sm_90a")
    fn = KdaState(K, V, dtype, has_h0, write_ht, v_tile)
    B, T, HV = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def fake(element, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16)

    def keys(element):
        return fake(element, B, T, HV, K)

    def values():
        return fake(fn.io, B, T, HV, V)

    def state():
        return fake(Float32, B, HV, K, V)

    args = (
        keys(fn.io),
        keys(fn.io),
        keys(fn.io),
        values(),
        fake(fn.io, B, T, HV, CHUNK),
        keys(Float32),
        state() if has_h0 else None,
        values(),
        state() if write_ht else None,
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return fn, args
