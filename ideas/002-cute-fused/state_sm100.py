"""KDA state scan and output for Blackwell (sm_100a, sm_103a), written as plainly as possible.

One CTA per (batch b, value head, V tile of BV = 64); one warpgroup that does everything; chunks of C = 64 tokens in
order. The state h [K, BV] stays in fp32 registers from the first chunk to the last. Per chunk:

    1  copy the chunk's qg, w, kg, Aqk, u and the last row G of g2 to shared memory         TMA
    2  round h to the io dtype, store it as an operand                                      registers -> shared
    3  WH = w h,  OH = qg h                                                                 tensor core
    4  v' = u - WH, rounded to the io dtype, stored as an operand                           registers -> shared
    5  DH^T = v'^T kg,  OI = Aqk v'                                                         tensor core
    6  o = scale OH + OI                                                                    registers -> shared -> TMA
    7  h = 2^G h + DH        (G, log2 units, one factor per row of h)                       registers

Nothing overlaps: the warpgroup waits for each step. Rung 003 spreads the same steps over warps. Rounding points are
fla's: h where it is an operand, v' before its two products, o at the end; everything else is fp32.

Aqk arrives with `scale` folded in and its strict upper triangle zero (the product contracts the whole tile).

Layouts. Tensors arrive in their natural layout, [B, T, HV, X] with X contiguous. Inside, a view names its MMA modes
first, (M or N, contraction, HV, B):

    operand      of    view              major   shared memory, one 128-byte swizzled image each
    qg, w        A     (T, K, HV, B)     K       [64, K]
    Aqk          A     (T, C, HV, B)     K       [64, 64]
    kg           B     (K, T, HV, B)     MN      [K, 64]: the bytes of kg as they come; the MMA reads them transposed
    h            B     h^T [BV, K]       K       written from registers
    v'           A, B  v'^T [BV, C]      K       written once; A of DH^T and B of OI are the same bytes at BV = C
    u, o         -     (T, V, HV, B)     -       [64, 64], swizzled too: rows of 128 bytes would share banks
    g2           -     (K, T, HV, B)     -       one row, [K] fp32

A partial last chunk needs no code of its own: TMA fills rows past T with zeros (so v' and kg are zero there), clips
them from o, and the decay row is the last valid one.

Accumulators are M = 64 tiles, which tensor memory keeps in 16 lanes of each warp's 32; `ld.16x256b` is their load:
a thread then holds two rows (8 apart) and pairs of neighbouring columns, the shape `stmatrix` takes.

    TMEM columns   0..63 WH   64..127 OH   128..191 OI   192..192+K-1 DH^T      (512 or 256 allocated)

    what           who
    TMA issue      warp 0 (the copies elect a lane themselves)
    MMA issue      warp 0 (likewise); a commit by one elected lane
    everything     warps 0 to 3: warp i reads lanes 32 i .. 32 i + 15 of tensor memory

    mbarrier   count        arrives                            waits            completes per chunk
    loaded     1 + bytes    warp 0's elected lane, TMA         all 128          1
    multiplied 1            tcgen05.commit                     all 128          2

    CTA barrier, per chunk: h stored (also: o of the chunk before copied out of shared memory); v' stored; o stored
    (also: every load of this chunk's u, G and accumulators is done).
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
THREADS = 128


class Mbar(IntEnum):
    LOADED = 0
    MULTIPLIED = 1


class StateKernel:
    """The scan for one (K, dtype); `has_h0` and `write_ht` say whether h0 is read and ht written."""

    def __init__(self, io, K: int, has_h0: bool, write_ht: bool):
        self.io, self.K, self.has_h0, self.write_ht = io, K, has_h0, write_ht

    # ---- static layouts; built in the host region and again in the kernel's, which cannot see the host's values ----

    def _mmas(self):
        """The three products as (tiled MMA, (M, N, contraction))."""
        k, mn, one, smem = OperandMajorMode.K, OperandMajorMode.MN, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM

        def mma(b_major, tile):
            return sm100.make_trivial_tiled_mma(self.io, self.io, k, b_major, F32, one, tile[:2], smem), tile

        return SimpleNamespace(h=mma(k, (C, BV, self.K)), o=mma(k, (C, BV, C)), d=mma(mn, (BV, self.K, C)))

    def _layouts(self, mma):
        io, row = self.io, LayoutEnum.ROW_MAJOR
        return SimpleNamespace(
            qg=sm100.make_smem_layout_a(*mma.h, io, 1),
            w=sm100.make_smem_layout_a(*mma.h, io, 1),
            kg=sm100.make_smem_layout_b(*mma.d, io, 1),
            aqk=sm100.make_smem_layout_a(*mma.o, io, 1),
            h=sm100.make_smem_layout_b(*mma.h, io, 1),
            vp=sm100.make_smem_layout_b(*mma.o, io, 1),
            vp_a=sm100.make_smem_layout_a(*mma.d, io, 1),
            u=sm100.make_smem_layout_epi(io, row, (C, BV), 1),
            o=sm100.make_smem_layout_epi(io, row, (C, BV), 1),
            # the images of h and v' as the registers write them: h^T [BV, K], v' [C, BV] with C contiguous
            h_st=sm100.make_smem_layout_epi(io, row, (BV, self.K), 1),
            vp_st=sm100.make_smem_layout_epi(io, LayoutEnum.COL_MAJOR, (C, BV), 1),
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
            vp: tile(lay.vp)
            u: tile(lay.u)
            o: tile(lay.o)
            g: cute.struct.Align[cute.struct.MemRange[F32, self.K], 128]
            mbar: cute.struct.MemRange[cutlass.Int64, len(Mbar)]
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
        tma_g, g_t = cpasync.make_tiled_tma_atom(load, cols(g2), cute.make_layout((self.K, 1)), (self.K, 1))
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
        K, io = self.K, self.io
        tid, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        T, V, HV = u.shape[0], u.shape[1], u.shape[2]
        tile, _, _ = cute.arch.block_idx()
        v_tile, head, batch = tile % (V // BV), tile // (V // BV) % HV, tile // (V // BV) // HV

        # shared memory
        mem = SmemAllocator().allocate(self.storage)

        def view(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        s_qg, s_w, s_kg = view(mem.qg, lay.qg), view(mem.w, lay.w), view(mem.kg, lay.kg)
        s_aqk, s_u, s_o = view(mem.aqk, lay.aqk), view(mem.u, lay.u), view(mem.o, lay.o)
        s_h, s_h_st = view(mem.h, lay.h), view(mem.h, lay.h_st)
        s_vp, s_vp_a, s_vp_st = view(mem.vp, lay.vp), view(mem.vp, lay.vp_a), view(mem.vp, lay.vp_st)
        s_g = mem.g.get_tensor(cute.make_layout((K, 1)))
        loaded, multiplied = mem.mbar.data_ptr() + Mbar.LOADED, mem.mbar.data_ptr() + Mbar.MULTIPLIED
        load_bytes = sum(cute.size_in_bytes(io, x) for x in (lay.qg, lay.w, lay.kg, lay.aqk, lay.u)) + 4 * K

        # barriers and tensor memory
        columns = 512 if K == 128 else 256
        if warp_id == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(loaded, 1)
                cute.arch.mbarrier_init(multiplied, 1)
            cute.arch.alloc_tmem(columns, mem.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        # TMA and commits, too, use an mbarrier through the generic proxy (PTX ISA): this hands it to all
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(F32, 16, mem.tmem)

        def accumulator(m, column):
            tiled, shape = m
            return cute.make_tensor(tmem + column, tiled.make_fragment_C(tiled.partition_shape_C(shape[:2])).layout)

        t_wh, t_oh = accumulator(mma.h, 0), accumulator(mma.h, 64)
        t_oi, t_dh = accumulator(mma.o, 128), accumulator(mma.d, 192)

        # TMA partitions: (what one copy moves, chunk), for this head and V tile
        def operand(tma, smem, x, tile_shape, coord, part):
            mine = cute.local_tile(x, tile_shape, coord)
            mine = cute.group_modes(part(mine), 0, 3) if part else cute.group_modes(mine, 0, 2)
            smem = cute.group_modes(smem, 0, cute.rank(smem) - 1)
            return cpasync.tma_partition(tma, 0, cute.make_layout(1), smem, mine)

        by_chunk, by_v = (None, 0, head, batch), (None, v_tile, head, batch)
        thr_h, thr_o, thr_d = mma.h[0].get_slice(0), mma.o[0].get_slice(0), mma.d[0].get_slice(0)
        qg_s, qg_g = operand(tma_qg, s_qg, qg, (C, K), by_chunk, thr_h.partition_A)
        w_s, w_g = operand(tma_w, s_w, w, (C, K), by_chunk, thr_h.partition_A)
        aqk_s, aqk_g = operand(tma_aqk, s_aqk, aqk, (C, C), by_chunk, thr_o.partition_A)
        kg_s, kg_g = operand(tma_kg, s_kg, kg, (K, C), (0, None, head, batch), thr_d.partition_B)
        u_s, u_g = operand(tma_u, s_u, u, (C, BV), by_v, None)
        o_s, o_g = operand(tma_o, s_o, o, (C, BV), by_v, None)
        s_g3 = cute.make_tensor(s_g.iterator, cute.make_layout((K, 1, 1)))
        g_s, g_g = operand(tma_g, s_g3, g2, (K, 1), (0, None, head, batch), None)

        # tensor memory -> registers -> shared memory, for a [64, 64] and a [64, K] accumulator
        def reader(acc, n):
            atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(n // 8)), F32)
            flat = acc[((None, None), 0, 0)]
            tiled = tcgen05.make_tmem_copy(atom, flat)
            return tiled, tiled.get_slice(tid), flat

        def writer(tiled_read, smem, transpose):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), io)
            tiled = cute.make_tiled_copy_D(atom, tiled_read)
            thr = tiled.get_slice(tid)
            return tiled, thr, thr.partition_D(smem)[(None, None, None, 0)]

        read_c, thr_c, wh_src = reader(t_wh, BV)
        oh_src = thr_c.partition_S(t_oh[((None, None), 0, 0)])
        oi_src = thr_c.partition_S(t_oi[((None, None), 0, 0)])
        wh_src = thr_c.partition_S(wh_src)
        read_k, thr_k, dh_src = reader(t_dh, K)
        dh_src = thr_k.partition_S(dh_src)
        write_vp, thr_vp, vp_dst = writer(read_c, s_vp_st, True)
        write_o, thr_wo, o_dst = writer(read_c, s_o, False)
        write_h, thr_wh, h_dst = writer(read_k, s_h_st, False)

        # registers. The fragment of h: (v, k) coordinates, and the decay broadcast over v
        at = thr_k.partition_D(cute.make_identity_tensor((BV, K)))
        my_u = thr_c.partition_D(s_u)[(None, None, None, 0)]
        my_g = thr_k.partition_D(cute.make_tensor(s_g.iterator, cute.make_layout((BV, K), stride=(0, 1))))
        shape_c = thr_c.partition_D(cute.make_identity_tensor((C, BV))).shape
        r_wh, r_oi = cute.make_rmem_tensor(shape_c, F32), cute.make_rmem_tensor(shape_c, F32)
        r_c = cute.make_rmem_tensor(shape_c, io)
        r_h, r_dh = cute.make_rmem_tensor(at.shape, F32), cute.make_rmem_tensor(at.shape, F32)
        r_h_io = cute.make_rmem_tensor(at.shape, io)

        for i in cutlass.range(cute.size(r_h), unroll_full=True):
            if cutlass.const_expr(self.has_h0):
                r_h[i] = h0[(batch, head, at[i][1], v_tile * BV + at[i][0])]
            else:
                r_h[i] = F32(0.0)

        def multiply(m, acc, a, b):
            tiled, _ = m
            frag_a, frag_b = tiled.make_fragment_A(a), tiled.make_fragment_B(b)
            for kk in range(cute.size(frag_a, mode=[2])):
                tiled.set(tcgen05.Field.ACCUMULATE, kk != 0)
                cute.gemm(tiled, acc, frag_a[None, None, kk, 0], frag_b[None, None, kk, 0], acc)

        for c in cutlass.range((T + C - 1) // C, unroll=1):
            # 1: load the chunk
            if warp_id == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(loaded, load_bytes)
                cute.copy(tma_w, w_g[None, c], w_s[None, 0], tma_bar_ptr=loaded)
                cute.copy(tma_qg, qg_g[None, c], qg_s[None, 0], tma_bar_ptr=loaded)
                cute.copy(tma_u, u_g[None, c], u_s[None, 0], tma_bar_ptr=loaded)
                cute.copy(tma_kg, kg_g[None, c], kg_s[None, 0], tma_bar_ptr=loaded)
                cute.copy(tma_g, g_g[None, cutlass.min(c * C + C, T) - 1], g_s[None, 0], tma_bar_ptr=loaded)
                cute.copy(tma_aqk, aqk_g[None, c], aqk_s[None, 0], tma_bar_ptr=loaded)
            # 2: h as an operand; the fence hands the stores to the tensor core's proxy
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                r_h_io[i] = r_h[i].to(io)
            cute.copy(write_h, thr_wh.retile(r_h_io), h_dst)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(loaded, c % 2)
            # 3: WH = w h, OH = qg h
            if warp_id == 0:
                multiply(mma.h, t_wh, s_w, s_h)
                multiply(mma.h, t_oh, s_qg, s_h)
                with cute.arch.elect_one():
                    tcgen05.commit(multiplied)
            cute.arch.mbarrier_wait(multiplied, 0)
            # 4: v' = u - WH
            cute.copy(read_c, wh_src, r_wh)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range(cute.size(r_wh), unroll_full=True):
                r_c[i] = (my_u[i].to(F32) - r_wh[i]).to(io)
            cute.copy(write_vp, thr_vp.retile(r_c), vp_dst)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            # 5: DH^T = v'^T kg, OI = Aqk v'
            if warp_id == 0:
                multiply(mma.d, t_dh, s_vp_a, s_kg)
                multiply(mma.o, t_oi, s_aqk, s_vp)
                with cute.arch.elect_one():
                    tcgen05.commit(multiplied)
            cute.arch.mbarrier_wait(multiplied, 1)
            # 6: o = scale OH + OI
            cute.copy(read_c, oh_src, r_wh)
            cute.copy(read_c, oi_src, r_oi)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range(cute.size(r_wh), unroll_full=True):
                r_c[i] = (scale * r_wh[i] + r_oi[i]).to(io)
            cute.copy(write_o, thr_wo.retile(r_c), o_dst)
            # 7: h = 2^G h + DH
            cute.copy(read_k, dh_src, r_dh)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                r_h[i] = cute.math.exp2(my_g[i], fastmath=True) * r_h[i] + r_dh[i]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if warp_id == 0:
                with cute.arch.elect_one():  # a store, unlike a load, elects no lane of its own
                    cute.copy(tma_o, o_s[None, 0], o_g[None, c])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            # No barrier here: s_o is next written after the next chunk's first, which warp 0 reaches past this wait.

        if cutlass.const_expr(self.write_ht):
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                ht[(batch, head, at[i][1], v_tile * BV + at[i][0])] = r_h[i]
        if warp_id == 0:
            cute.arch.dealloc_tmem(tmem, columns)


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
