"""KDA state scan and output for Blackwell (sm_100a, sm_103a), warp-specialised.

The equations, the operands' layouts and the rounding points are those of rung 002's state_sm100.py; here the steps run
on different warps at once. One CTA per (batch, value head, V tile of BV = 64), chunks of C = 64 tokens in order, the
state h [K, BV] in fp32 registers of the recurrence group:

    WH = w h                                 MMA          heads the critical path
    v' = u - WH                              recurrence   rounded to the io dtype
    OH = qg h                                MMA          while the recurrence works on v'
    DH^T = v'^T kg                           MMA          before OI: the next chunk waits for it
    OI = Aqk v'                              MMA          while the recurrence updates h
    o = scale OH + OI                        epilogue
    h = 2^G h + DH                           recurrence   2^G, a factor per row of h, while WH is computed

    role         warps    does
    RECURRENCE   0..3     v', h as an operand, the h update, ht; warp i owns lanes 32 i of tensor memory
    EPILOGUE     4..7     o, and its TMA store
    TMA          8        every load
    MMA          9        every product, in the order above; allocates tensor memory

The critical path of a chunk is h -> WH -> v' -> DH -> h; nothing else is on it. Chunk c uses stage s = c mod 2 of
everything that has two, and phase c / 2 of its barriers; of single-stage barriers, phase c.

    mbarrier    stages   count       arrives                     waits        says
    MMA_FULL    2        1 + bytes   TMA                         MMA          w, qg, kg, Aqk of chunk c are in stage s
    MMA_EMPTY   2        1           commit after OI             TMA          their last product is done; u, G are read
    REC_FULL    2        1 + bytes   TMA                         RECURRENCE   u, G of chunk c are in stage s
    H_FULL      2        128         RECURRENCE                  MMA          h before chunk c is in stage s
    VD_FULL     1        128         RECURRENCE                  MMA          v' as A operand of DH^T
    VO_FULL     1        128         RECURRENCE                  MMA          v' as B operand of OI
    WH_FULL     1        1           commit after WH             RECURRENCE   WH is in tensor memory
    DH_FULL     1        1           commit after DH             RECURRENCE   DH is
    O_FULL      2        1           commit after OI             EPILOGUE     OH and OI are, in stage s
    O_EMPTY     2        128         EPILOGUE                    MMA          they are in registers

h, v', u, G, WH and DH have no EMPTY barrier: the other direction is implied. A commit tracks every product issued
before it, so WH_FULL of chunk c also says that OI of c-1 is done with v', and DH_FULL that WH and OH are done with h;
and the recurrence arrives on H_FULL and VD_FULL only after it has read the accumulators which the products behind them
will overwrite, and on VO_FULL after it has read u and G: OI and its MMA_EMPTY come later. Each of 128 threads fences
its own stores and arrives for itself, so no barrier among them is needed either.
In the end the TMA warp waits for the last MMA_EMPTY: a commit must not arrive in shared memory that the CTA has left.

v' is stored twice, as each product's operand, DH's first: the second store and its fence come after VD_FULL, off the
critical path. At BV = C both images hold the same bytes (rung 002 has one); one VD_FULL for both would do as well.

    named barrier 1 (128, EPILOGUE): o of chunk c is in shared memory; the store of c-1 has been read out of its stage

OH, OI and o have two stages so that the epilogue may lag one chunk without delaying DH, which queues behind OH.

    TMEM columns   0 WH   64 OH (2 stages)   192 OI (2 stages)   320 DH^T, K of them   (512 allocated)
"""

from enum import IntEnum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ARCHS = ("sm_100a", "sm_103a")
F32 = cutlass.Float32
C = 64  # tokens per chunk
BV = 64  # columns of V per CTA
GROUP = 128  # threads of the recurrence group, and of the epilogue group
STAGES = 2
THREADS = 320
TMEM_COLUMNS = 512
WH, OH, OI, DH = 0, 64, 192, 320  # their first columns


class Role(IntEnum):
    """First warp of each role."""

    RECURRENCE = 0
    EPILOGUE = 4
    TMA = 8
    MMA = 9


class Bar(IntEnum):
    """Index of each mbarrier, of its first stage where it has two."""

    MMA_FULL = 0
    MMA_EMPTY = 2
    REC_FULL = 4
    H_FULL = 6
    O_FULL = 8
    O_EMPTY = 10
    VD_FULL = 12
    VO_FULL = 13
    WH_FULL = 14
    DH_FULL = 15


BARRIERS = 16
PER_THREAD = (Bar.H_FULL, Bar.O_EMPTY, Bar.VD_FULL, Bar.VO_FULL)  # count 128; of the others, 1
SINGLE = (Bar.VD_FULL, Bar.VO_FULL, Bar.WH_FULL, Bar.DH_FULL)
EPILOGUE_BARRIER = 1  # named barrier; 0 is sync_threads


def product(out, operands, a_stage, b_stage):
    """Issue `out = a b` over the whole contraction; the MMAs elect a lane themselves."""
    tiled, a, b = operands
    for k in range(cute.size(a, mode=[2])):
        tiled.set(tcgen05.Field.ACCUMULATE, k != 0)
        cute.gemm(tiled, out, a[None, None, k, a_stage], b[None, None, k, b_stage], out)


def commit(bar):
    """Arrive on `bar` when every product issued so far is done."""
    with cute.arch.elect_one():
        tcgen05.commit(bar)


def hand_over(bar):
    """Each thread makes its own stores visible to the tensor core, then says so."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(bar)


def round_to(source, destination):
    for i in range(cute.size(source)):
        destination[i] = source[i].to(destination.element_type)


class StateKernel:
    """The scan for one (K, dtype); `has_h0` and `write_ht` say whether h0 is read and ht written."""

    def __init__(self, io, K: int, has_h0: bool, write_ht: bool):
        self.io, self.K, self.has_h0, self.write_ht = io, K, has_h0, write_ht

    # ---- static layouts; built in the host region and again in the kernel's, which cannot see the host's values ----

    def _mmas(self):
        """The three kinds of product as (tiled MMA, (M, N, contraction)): WH and OH, OI, DH^T."""
        k, mn, one, smem = OperandMajorMode.K, OperandMajorMode.MN, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM

        def mma(b_major, tile):
            return sm100.make_trivial_tiled_mma(self.io, self.io, k, b_major, F32, one, tile[:2], smem), tile

        return SimpleNamespace(h=mma(k, (C, BV, self.K)), o=mma(k, (C, BV, C)), d=mma(mn, (BV, self.K, C)))

    def _layouts(self, mma):
        io, row = self.io, LayoutEnum.ROW_MAJOR
        return SimpleNamespace(
            qg=sm100.make_smem_layout_a(*mma.h, io, STAGES),
            w=sm100.make_smem_layout_a(*mma.h, io, STAGES),
            kg=sm100.make_smem_layout_b(*mma.d, io, STAGES),
            aqk=sm100.make_smem_layout_a(*mma.o, io, STAGES),
            h=sm100.make_smem_layout_b(*mma.h, io, STAGES),
            vd=sm100.make_smem_layout_a(*mma.d, io, 1),
            vo=sm100.make_smem_layout_b(*mma.o, io, 1),
            u=sm100.make_smem_layout_epi(io, row, (C, BV), STAGES),
            o=sm100.make_smem_layout_epi(io, row, (C, BV), STAGES),
            g=cute.make_layout((self.K, 1, STAGES)),
            # the images of h and v' as the registers write them: h^T [BV, K], v' [C, BV] with C contiguous
            h_st=sm100.make_smem_layout_epi(io, row, (BV, self.K), STAGES),
            v_st=sm100.make_smem_layout_epi(io, LayoutEnum.COL_MAJOR, (C, BV), 1),
        )

    def _storage(self, lay):
        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[self.io, cute.cosize(layout)], 1024]

        @cute.struct
        class Storage:
            qg: tile(lay.qg)
            w: tile(lay.w)
            kg: tile(lay.kg)
            aqk: tile(lay.aqk)
            h: tile(lay.h)
            vd: tile(lay.vd)
            vo: tile(lay.vo)
            u: tile(lay.u)
            o: tile(lay.o)
            g: cute.struct.Align[cute.struct.MemRange[F32, cute.cosize(lay.g)], 128]
            bars: cute.struct.MemRange[cutlass.Int64, BARRIERS]
            tmem: cutlass.Int32

        return Storage

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        qg: cute.Tensor,  # [B, T, HV, K] io: q * 2^g2
        w: cute.Tensor,  # [B, T, HV, K] io
        kg: cute.Tensor,  # [B, T, HV, K] io: k * 2^(G - g2)
        u: cute.Tensor,  # [B, T, HV, V] io
        aqk: cute.Tensor,  # [B, T, HV, C] io, scale folded in, strict upper triangle zero
        g2: cute.Tensor,  # [B, T, HV, K] fp32, chunk-local cumulated log decay, log2 units
        h0: cute.Tensor | None,  # [B, HV, K, V] fp32, or None without has_h0
        o: cute.Tensor,  # [B, T, HV, V] io, written
        ht: cute.Tensor | None,  # [B, HV, K, V] fp32, written, or None without write_ht
        scale: F32,
        stream,
    ):
        mma = self._mmas()
        lay = self._layouts(mma)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def rows(x):  # [B, T, HV, X] -> (T, X, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))

        def cols(x):  # [B, T, HV, X] -> (X, T, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 1, 2, 0]))

        def one(layout):
            return cute.select(layout, mode=list(range(cute.rank(layout) - 1)))

        def operand_a(x, layout, m):
            return cute.nvgpu.make_tiled_tma_atom_A(load, x, one(layout), m[1], m[0])

        tma_qg, qg_t = operand_a(rows(qg), lay.qg, mma.h)
        tma_w, w_t = operand_a(rows(w), lay.w, mma.h)
        tma_aqk, aqk_t = operand_a(rows(aqk), lay.aqk, mma.o)
        tma_kg, kg_t = cute.nvgpu.make_tiled_tma_atom_B(load, cols(kg), one(lay.kg), mma.d[1], mma.d[0])
        tma_u, u_t = cpasync.make_tiled_tma_atom(load, rows(u), one(lay.u), (C, BV))
        tma_g, g_t = cpasync.make_tiled_tma_atom(load, cols(g2), one(lay.g), (self.K, 1))
        tma_o, o_t = cpasync.make_tiled_tma_atom(store, rows(o), one(lay.o), (C, BV))

        B, _, HV, V = u.shape
        self.storage = self._storage(lay)
        self.kda_state(
            tma_qg, qg_t, tma_w, w_t, tma_kg, kg_t, tma_aqk, aqk_t, tma_u, u_t, tma_g, g_t, tma_o, o_t, h0, ht, scale
        ).launch(grid=(B * HV * (V // BV), 1, 1), block=(THREADS, 1, 1), stream=stream)

    # ---- device ----

    @cute.kernel
    def kda_state(
        self,
        tma_qg: cute.CopyAtom, qg: cute.Tensor,
        tma_w: cute.CopyAtom, w: cute.Tensor,
        tma_kg: cute.CopyAtom, kg: cute.Tensor,
        tma_aqk: cute.CopyAtom, aqk: cute.Tensor,
        tma_u: cute.CopyAtom, u: cute.Tensor,
        tma_g: cute.CopyAtom, g2: cute.Tensor,
        tma_o: cute.CopyAtom, o: cute.Tensor,
        h0: cute.Tensor | None,
        ht: cute.Tensor | None,
        scale: F32,
    ):  # fmt: skip
        mma = self._mmas()
        lay = self._layouts(mma)
        tid, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        T, V, HV = u.shape[0], u.shape[1], u.shape[2]
        tile, _, _ = cute.arch.block_idx()
        v_tile, head, batch = tile % (V // BV), tile // (V // BV) % HV, tile // (V // BV) // HV
        chunks = (T + C - 1) // C

        mem = SmemAllocator().allocate(self.storage)

        def view(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        s = SimpleNamespace(
            qg=view(mem.qg, lay.qg), w=view(mem.w, lay.w), kg=view(mem.kg, lay.kg), aqk=view(mem.aqk, lay.aqk),
            h=view(mem.h, lay.h), h_st=view(mem.h, lay.h_st), vd=view(mem.vd, lay.vd), vo=view(mem.vo, lay.vo),
            vd_st=view(mem.vd, lay.v_st), vo_st=view(mem.vo, lay.v_st), u=view(mem.u, lay.u), o=view(mem.o, lay.o),
            g=mem.g.get_tensor(lay.g),
        )  # fmt: skip
        bars = mem.bars.data_ptr()

        if warp_id == Role.MMA:
            with cute.arch.elect_one():
                for bar in Bar:
                    for stage in range(1 if bar in SINGLE else STAGES):
                        cute.arch.mbarrier_init(bars + bar + stage, GROUP if bar in PER_THREAD else 1)
            cute.arch.alloc_tmem(TMEM_COLUMNS, mem.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        # TMA and commits, too, use an mbarrier through the generic proxy (PTX ISA): this hands it to all
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(F32, 16, mem.tmem)

        def accumulator(m, column, stages):
            """(MMA, 1, 1, stage), from `column` on."""
            tiled, (rows, columns, _) = m
            one = tiled.make_fragment_C(tiled.partition_shape_C((rows, columns))).layout
            return cute.make_tensor(tmem + column, cute.append(one, cute.make_layout(stages, stride=columns)))

        acc = SimpleNamespace(
            wh=accumulator(mma.h, WH, 1), oh=accumulator(mma.h, OH, STAGES), oi=accumulator(mma.o, OI, STAGES),
            dh=accumulator(mma.d, DH, 1),
        )  # fmt: skip
        at = SimpleNamespace(head=head, batch=batch, v_tile=v_tile, chunks=chunks, T=T)

        if warp_id == Role.TMA:
            tma = SimpleNamespace(
                qg=(tma_qg, qg), w=(tma_w, w), kg=(tma_kg, kg), aqk=(tma_aqk, aqk), u=(tma_u, u), g=(tma_g, g2)
            )
            self.load(tma, s, bars, mma, at)
        elif warp_id == Role.MMA:
            self.multiply(s, acc, bars, mma, at)
        elif warp_id < Role.EPILOGUE:
            self.recur(s, acc, bars, h0, ht, at, tid)
        else:
            self.write(tma_o, o, s, acc, bars, scale, at, tid - Role.EPILOGUE * 32, warp_id)

        cute.arch.sync_threads()
        if warp_id == Role.MMA:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    @cute.jit
    def load(self, tma, s, bars, mma, at):
        """TMA warp: the MMA's operands and the recurrence's inputs, each set into its own two stages."""
        K, cta = self.K, cute.make_layout(1)
        with cute.arch.elect_one():
            for atom, _ in vars(tma).values():
                cpasync.prefetch_descriptor(atom)

        def partition(pair, smem, tile, coord, part=None):
            atom, x = pair
            mine = cute.local_tile(x, tile, coord)
            mine = cute.group_modes(part(mine), 0, 3) if part else cute.group_modes(mine, 0, 2)
            return cpasync.tma_partition(atom, 0, cta, cute.group_modes(smem, 0, cute.rank(smem) - 1), mine)

        by_chunk, by_column = (None, 0, at.head, at.batch), (0, None, at.head, at.batch)
        thr_h, thr_o, thr_d = mma.h[0].get_slice(0), mma.o[0].get_slice(0), mma.d[0].get_slice(0)
        w_s, w_g = partition(tma.w, s.w, (C, K), by_chunk, thr_h.partition_A)
        qg_s, qg_g = partition(tma.qg, s.qg, (C, K), by_chunk, thr_h.partition_A)
        kg_s, kg_g = partition(tma.kg, s.kg, (K, C), by_column, thr_d.partition_B)
        aqk_s, aqk_g = partition(tma.aqk, s.aqk, (C, C), by_chunk, thr_o.partition_A)
        u_s, u_g = partition(tma.u, s.u, (C, BV), (None, at.v_tile, at.head, at.batch))
        g_s, g_g = partition(tma.g, s.g, (K, 1), by_column)

        def stage_bytes(*tensors):
            return sum(cute.size_in_bytes(x.element_type, x.layout) // STAGES for x in tensors)

        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % STAGES, c // STAGES % 2
            full = bars + Bar.MMA_FULL + stage
            cute.arch.mbarrier_wait(bars + Bar.MMA_EMPTY + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(s.w, s.qg, s.kg, s.aqk))
            cute.copy(tma.w[0], w_g[None, c], w_s[None, stage], tma_bar_ptr=full)
            cute.copy(tma.qg[0], qg_g[None, c], qg_s[None, stage], tma_bar_ptr=full)
            cute.copy(tma.kg[0], kg_g[None, c], kg_s[None, stage], tma_bar_ptr=full)
            cute.copy(tma.aqk[0], aqk_g[None, c], aqk_s[None, stage], tma_bar_ptr=full)

            full = bars + Bar.REC_FULL + stage
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(s.u, s.g))
            cute.copy(tma.u[0], u_g[None, c], u_s[None, stage], tma_bar_ptr=full)
            last_row = cutlass.min(c * C + C, at.T) - 1
            cute.copy(tma.g[0], g_g[None, last_row], g_s[None, stage], tma_bar_ptr=full)

        # the last commit arrives in this CTA's shared memory: stay until it has
        last = at.chunks - 1
        cute.arch.mbarrier_wait(bars + Bar.MMA_EMPTY + last % STAGES, last // STAGES % 2)

    @cute.jit
    def multiply(self, s, acc, bars, mma, at):
        """MMA warp: WH, OH, DH, OI of each chunk, in this order."""

        def operands(m, a, b):
            tiled, _ = m
            return tiled, tiled.make_fragment_A(a), tiled.make_fragment_B(b)

        wh, oh = operands(mma.h, s.w, s.h), operands(mma.h, s.qg, s.h)
        dh, oi = operands(mma.d, s.vd, s.kg), operands(mma.o, s.aqk, s.vo)

        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % STAGES, c // STAGES % 2
            cute.arch.mbarrier_wait(bars + Bar.MMA_FULL + stage, phase)
            cute.arch.mbarrier_wait(bars + Bar.H_FULL + stage, phase)
            product(acc.wh[None, None, None, 0], wh, stage, stage)
            commit(bars + Bar.WH_FULL)
            cute.arch.mbarrier_wait(bars + Bar.O_EMPTY + stage, phase ^ 1)
            product(acc.oh[None, None, None, stage], oh, stage, stage)
            cute.arch.mbarrier_wait(bars + Bar.VD_FULL, c % 2)
            product(acc.dh[None, None, None, 0], dh, 0, stage)
            commit(bars + Bar.DH_FULL)
            cute.arch.mbarrier_wait(bars + Bar.VO_FULL, c % 2)
            product(acc.oi[None, None, None, stage], oi, stage, 0)
            commit(bars + Bar.O_FULL + stage)
            commit(bars + Bar.MMA_EMPTY + stage)

    def _reader(self, acc, columns, tid):
        """Tensor memory -> registers for a [64, columns] accumulator: (tiled copy, this thread's part of it)."""
        atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(columns // 8)), F32)
        tiled = tcgen05.make_tmem_copy(atom, acc[((None, None), 0, 0, 0)])
        return tiled, tiled.get_slice(tid)

    def _writer(self, tiled_read, smem, transpose, tid):
        """Registers, as `tiled_read` leaves them, -> an operand's image: (tiled copy, thread's part, destination)."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), self.io)
        tiled = cute.make_tiled_copy_D(atom, tiled_read)
        thr = tiled.get_slice(tid)
        return tiled, thr, thr.partition_D(smem)

    @cute.jit
    def recur(self, s, acc, bars, h0, ht, at, tid):
        """Recurrence group: v' from WH, h from DH, each handed on as an operand; in the end ht."""
        K, io = self.K, self.io
        read_wh, thr_wh = self._reader(acc.wh, BV, tid)
        read_dh, thr_dh = self._reader(acc.dh, K, tid)
        wh_src = thr_wh.partition_S(acc.wh[((None, None), 0, 0, 0)])
        dh_src = thr_dh.partition_S(acc.dh[((None, None), 0, 0, 0)])
        write_v, thr_v, vd_dst = self._writer(read_wh, s.vd_st, True, tid)
        _, _, vo_dst = self._writer(read_wh, s.vo_st, True, tid)
        write_h, thr_h, h_dst = self._writer(read_dh, s.h_st, False, tid)

        # a fragment of h: its (v, k) coordinates, and the decay, broadcast over v
        coord = thr_dh.partition_D(cute.make_identity_tensor((BV, K)))
        my_u = thr_wh.partition_D(s.u)
        decay = cute.make_layout((BV, K, STAGES), stride=(0, 1, K))
        my_g = thr_dh.partition_D(cute.make_tensor(s.g.iterator, decay))
        r_u = cute.make_rmem_tensor(my_u[None, None, None, 0].shape, io)
        r_wh, r_v = cute.make_rmem_tensor(r_u.shape, F32), cute.make_rmem_tensor(r_u.shape, io)
        r_h, r_dh = cute.make_rmem_tensor(coord.shape, F32), cute.make_rmem_tensor(coord.shape, F32)
        r_h_io = cute.make_rmem_tensor(coord.shape, io)
        size_v, size_h = cute.size(r_wh), cute.size(r_h)

        for i in cutlass.range(size_h, unroll_full=True):
            if cutlass.const_expr(self.has_h0):
                r_h[i] = h0[(at.batch, at.head, coord[i][1], at.v_tile * BV + coord[i][0])]
            else:
                r_h[i] = F32(0.0)
        round_to(r_h, r_h_io)
        cute.copy(write_h, thr_h.retile(r_h_io), h_dst[None, None, None, 0])
        hand_over(bars + Bar.H_FULL)

        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % STAGES, c // STAGES % 2
            # while WH is computed: u to registers, and the decay out of log2 space
            cute.arch.mbarrier_wait(bars + Bar.REC_FULL + stage, phase)
            cute.autovec_copy(my_u[None, None, None, stage], r_u)
            g = my_g[None, None, None, stage]
            for i in cutlass.range(0, size_h, 2, unroll_full=True):
                # a packed product is not contracted with the sum below, which would take the exponentials with it
                factors = cute.math.exp2(g[i], fastmath=True), cute.math.exp2(g[i + 1], fastmath=True)
                r_h[i], r_h[i + 1] = cute.arch.mul_packed_f32x2((r_h[i], r_h[i + 1]), factors)

            cute.arch.mbarrier_wait(bars + Bar.WH_FULL, c % 2)
            cute.copy(read_wh, wh_src, r_wh)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range(size_v, unroll_full=True):
                r_v[i] = (r_u[i].to(F32) - r_wh[i]).to(io)
            cute.copy(write_v, thr_v.retile(r_v), vd_dst[None, None, None, 0])
            hand_over(bars + Bar.VD_FULL)
            cute.copy(write_v, thr_v.retile(r_v), vo_dst[None, None, None, 0])
            hand_over(bars + Bar.VO_FULL)

            cute.arch.mbarrier_wait(bars + Bar.DH_FULL, c % 2)
            cute.copy(read_dh, dh_src, r_dh)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range(0, size_h, 2, unroll_full=True):
                r_h[i], r_h[i + 1] = cute.arch.add_packed_f32x2((r_h[i], r_h[i + 1]), (r_dh[i], r_dh[i + 1]))
            if c + 1 < at.chunks:
                after = (c + 1) % STAGES
                round_to(r_h, r_h_io)
                cute.copy(write_h, thr_h.retile(r_h_io), h_dst[None, None, None, after])
                hand_over(bars + Bar.H_FULL + after)

        if cutlass.const_expr(self.write_ht):
            for i in cutlass.range(size_h, unroll_full=True):
                ht[(at.batch, at.head, coord[i][1], at.v_tile * BV + coord[i][0])] = r_h[i]

    @cute.jit
    def write(self, tma_o, o, s, acc, bars, scale, at, tid, warp_id):
        """Epilogue group: o from OH and OI, staged and stored while the recurrence goes on."""
        read, thr = self._reader(acc.oh, BV, tid)
        oh_src = thr.partition_S(acc.oh[((None, None), 0, 0, None)])
        oi_src = thr.partition_S(acc.oi[((None, None), 0, 0, None)])
        write_o, thr_o, o_dst = self._writer(read, s.o, False, tid)
        shape = thr.partition_D(cute.make_identity_tensor((C, BV))).shape
        r_oh, r_oi = cute.make_rmem_tensor(shape, F32), cute.make_rmem_tensor(shape, F32)
        r_o = cute.make_rmem_tensor(shape, self.io)
        tile = cute.local_tile(o, (C, BV), (None, at.v_tile, at.head, at.batch))
        o_s, o_g = cpasync.tma_partition(
            tma_o, 0, cute.make_layout(1), cute.group_modes(s.o, 0, 2), cute.group_modes(tile, 0, 2)
        )

        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % STAGES, c // STAGES % 2
            cute.arch.mbarrier_wait(bars + Bar.O_FULL + stage, phase)
            cute.copy(read, oh_src[None, None, None, stage], r_oh)
            cute.copy(read, oi_src[None, None, None, stage], r_oi)
            cute.arch.fence_view_async_tmem_load()
            cute.arch.mbarrier_arrive(bars + Bar.O_EMPTY + stage)
            for i in cutlass.range(cute.size(r_oh), unroll_full=True):
                r_o[i] = (scale * r_oh[i] + r_oi[i]).to(self.io)
            cute.copy(write_o, thr_o.retile(r_o), o_dst[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            # past this barrier the other stage may be written again: its store has been read out
            if warp_id == Role.EPILOGUE:
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=GROUP)
            if warp_id == Role.EPILOGUE:
                with cute.arch.elect_one():  # a store, unlike a load, elects no lane of its own
                    cute.copy(tma_o, o_s[None, stage], o_g[None, c])
                    cute.arch.cp_async_bulk_commit_group()
        if warp_id == Role.EPILOGUE:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)


StateKernel.kda_state.set_name_prefix("kda_state", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(arch: str, K: int, V: int, dtype: str, has_h0: bool = True, write_ht: bool = True):
    """The host function and the fake arguments to compile it with.

    K: 64 or 128. V: a multiple of 64. dtype: "bfloat16" or "float16", of every tensor but g2, h0 and ht (fp32).
    Tensors are contiguous and 16-byte aligned; B, T >= 1 and HV are free. h0 (ht) is None without has_h0 (write_ht).
    Raises ValueError naming the parameter that is not one of these.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch!r}, accepted: {', '.join(ARCHS)}")
    if K not in (64, 128):
        raise ValueError(f"K: got {K}, accepted: 64, 128")
    if V < BV or V % BV:
        raise ValueError(f"V: got {V}, accepted: multiples of {BV}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, accepted: {', '.join(DTYPES)}")
    io = DTYPES[dtype]
    B, T, HV = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def fake(element, *shape):
        return make_fake_compact_tensor(element, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    def k(element=io):
        return fake(element, B, T, HV, K)

    def v():
        return fake(io, B, T, HV, V)

    def state(used):
        return fake(F32, B, HV, K, V) if used else None

    tensors = (k(), k(), k(), v(), fake(io, B, T, HV, C), k(F32), state(has_h0), v(), state(write_ht))
    return StateKernel(io, K, has_h0, write_ht), (*tensors, F32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
