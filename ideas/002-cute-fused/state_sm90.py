"""KDA state scan and output in one kernel, Hopper (sm_90a), written plainly: one warpgroup, no overlap.

One CTA walks all chunks of one (batch b, value head hv, 64-wide V tile). Its state is kept TRANSPOSED, h^T [64, K] in
fp32, and never leaves registers. Every product then has a [64 V, *] left operand that is already in registers, so
nothing that one product hands to the next goes through shared memory.

Per chunk of 64 tokens (^T marks what the registers hold; io = bf16 or fp16; accumulation is fp32):

    step  equation                      as issued                                   rounding
    1     WH  = w h                     WH^T  = io(h^T) w^T                         h to io
    2     v'  = u - WH                  v'^T  = io(u^T - WH^T)                      v' to io
    3     OH  = qg h                    OH^T  = io(h^T) qg^T                        h to io (the same copy)
    4     o   = scale OH + Aqk v'       o^T   = scale OH^T + v'^T Aqk^T             o to io at the store
    5     h_k = 2^G_k h_k + (kg^T v')_k h^T   = h^T diag(2^G) + v'^T kg             none: h stays fp32

G is g2 at the chunk's last row, min(64 c + 63, T - 1), in log2 units. h_0 is `h0` or zero; after the last chunk h is
written to `ht`. Where T is no multiple of 64 the last chunk is partial: TMA fills rows past T with zeros on the way in
(then v' = 0 there and the state is untouched) and clips them on the way out.

Layout convention. A wgmma operand is named (M or N, contraction); registers hold M = 64 rows of the V tile.
    operand  smem view        major      used as
    w, qg    (64 token, K)    K          B of steps 1, 3: contraction over K
    Aqk      (64 token, 64)   K          B of step 4: N = query token i, contraction over key token j
    kg       (K, 64 token)    MN         B of step 5: N = k, contraction over token; the bytes are [token, K]
    u, o     (64 V, 64 token) V contig.  ldmatrix.trans / stmatrix.trans to and from the accumulator layout
All are 128-byte swizzled, one 64-column box a TMA instruction. An accumulator fragment ((2,2,N/8),1,1) and the A
fragment ((2,2,2),1,N/16) of the next product enumerate the same registers in the same order (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"), so turning one into the other is a cast.

Aqk must be finite on the whole tile and zero above the diagonal: the product contracts all of it.

    warps 0-3   all of it; warp 0 issues the TMA loads and the store
    MMA         m64n64k16 x K/16 (step 1), x K/16 (step 3), x 4 (step 4); m64nKk16 x 4 (step 5); A from registers
    barrier     count  arrives                        waits
    full        1      TMA warp + bytes of 5 tiles    all 128 threads, once a chunk
    bar.sync 0  128    all                            all: (a) decay in smem, and every smem read of chunk c done
                                                      before its refill; (b) o in smem before its store
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

CHUNK = 64
V_TILE = 64
IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class KdaState:
    """The jit function of one static configuration (see `build`)."""

    def __init__(self, K: int, V: int, dtype: str, has_h0: bool, write_ht: bool):
        if K not in (64, 128):
            raise ValueError(f"K: got {K}, accepted 64 or 128")
        if V <= 0 or V % V_TILE:
            raise ValueError(f"V: got {V}, accepted a positive multiple of {V_TILE}")
        if dtype not in IO:
            raise ValueError(f"dtype: got {dtype}, accepted {' or '.join(IO)}")
        self.K, self.V, self.io, self.has_h0, self.write_ht = K, V, IO[dtype], has_h0, write_ht

    # ---- static configuration, rebuilt identically on the host and in the kernel ----------------------------------

    def _mma(self, n: int, b_major: OperandMajorMode) -> cute.TiledMma:
        """m64 x n x k16, A from registers, B from shared memory, fp32 accumulator."""
        op = warpgroup.MmaF16BF16Op(
            self.io, Float32, (64, n, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def _smem(self, rows: int, cols: int, row_contiguous: bool) -> cute.ComposedLayout:
        """128-byte swizzled tile (rows, cols); `row_contiguous`: neighbours along a column are adjacent."""
        kind = warpgroup.SmemLayoutAtomKind.MN_SW128 if row_contiguous else warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.io)
        return cute.tile_to_shape(atom, (rows, cols), order=(1, 0) if row_contiguous else (0, 1))

    def _layouts(self):
        w = self._smem(CHUNK, self.K, False)
        kg = self._smem(self.K, CHUNK, True)
        aqk = self._smem(CHUNK, CHUNK, False)
        u = self._smem(V_TILE, CHUNK, True)
        return w, kg, aqk, u

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
        layout_w, layout_kg, layout_aqk, layout_u = self._layouts()
        io, K = self.io, self.K

        def rows(x):  # [B, T, HV, D] seen as (T, D, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))

        def columns(x):  # [B, T, HV, D] seen as (D, T, HV, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 1, 2, 0]))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_qg, m_qg = cpasync.make_tiled_tma_atom(load, rows(qg), layout_w, (CHUNK, K))
        tma_w, m_w = cpasync.make_tiled_tma_atom(load, rows(w), layout_w, (CHUNK, K))
        tma_kg, m_kg = cpasync.make_tiled_tma_atom(load, columns(kg), layout_kg, (K, CHUNK))
        tma_aqk, m_aqk = cpasync.make_tiled_tma_atom(load, rows(aqk), layout_aqk, (CHUNK, CHUNK))
        tma_u, m_u = cpasync.make_tiled_tma_atom(load, columns(u), layout_u, (V_TILE, CHUNK))
        tma_o, m_o = cpasync.make_tiled_tma_atom(store, columns(o), layout_u, (V_TILE, CHUNK))
        self.load_bytes = sum(cute.size_in_bytes(io, x) for x in (layout_w, layout_w, layout_kg, layout_aqk, layout_u))

        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[io, cute.cosize(layout)], 1024]

        @cute.struct
        class SharedStorage:
            full: Int64
            decay: cute.struct.MemRange[Float32, K]
            qg: tile(layout_w)
            w: tile(layout_w)
            kg: tile(layout_kg)
            aqk: tile(layout_aqk)
            u: tile(layout_u)
            o: tile(layout_u)

        self.storage = SharedStorage
        B, HV = qg.shape[0], qg.shape[2]
        self.kda_state(
            tma_qg, m_qg, tma_w, m_w, tma_kg, m_kg, tma_aqk, m_aqk, tma_u, m_u, tma_o, m_o, g2, h0, ht, scale
        ).launch(grid=(B * HV * (self.V // V_TILE), 1, 1), block=(128, 1, 1), stream=stream)

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
        tma_o: cute.CopyAtom,
        m_o: cute.Tensor,
        g2: cute.Tensor,
        h0: cute.Tensor | None,
        ht: cute.Tensor | None,
        scale: Float32,
    ):
        io, K = self.io, self.K
        tid, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bid, _, _ = cute.arch.block_idx()
        T, HV, n_v = g2.shape[1], g2.shape[2], self.V // V_TILE
        v_id, hv, b = bid % n_v, (bid // n_v) % HV, bid // (n_v * HV)

        # -- shared memory ---------------------------------------------------------------------------------------
        layout_w, layout_kg, layout_aqk, layout_u = self._layouts()
        smem = SmemAllocator().allocate(self.storage)
        s_qg = smem.qg.get_tensor(layout_w.outer, swizzle=layout_w.inner)
        s_w = smem.w.get_tensor(layout_w.outer, swizzle=layout_w.inner)
        s_kg = smem.kg.get_tensor(layout_kg.outer, swizzle=layout_kg.inner)
        s_aqk = smem.aqk.get_tensor(layout_aqk.outer, swizzle=layout_aqk.inner)
        s_u = smem.u.get_tensor(layout_u.outer, swizzle=layout_u.inner)
        s_o = smem.o.get_tensor(layout_u.outer, swizzle=layout_u.inner)
        s_decay = smem.decay.get_tensor(cute.make_layout(K))
        full = smem.full.ptr

        if warp_id == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
        # TMA, too, uses an mbarrier through the generic proxy (PTX ISA, cp.async.bulk.tensor): this hands it to all
        cute.arch.sync_threads()

        # -- the tiles of this CTA, one column a chunk -------------------------------------------------------------
        def tma(atom, tensor, smem_tile, shape, coord):
            g = cute.local_tile(tensor, shape, coord)
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(smem_tile, 0, 2), cute.group_modes(g, 0, 2)
            )

        t_qg, g_qg = tma(tma_qg, m_qg, s_qg, (CHUNK, K), (None, 0, hv, b))
        t_w, g_w = tma(tma_w, m_w, s_w, (CHUNK, K), (None, 0, hv, b))
        t_kg, g_kg = tma(tma_kg, m_kg, s_kg, (K, CHUNK), (0, None, hv, b))
        t_aqk, g_aqk = tma(tma_aqk, m_aqk, s_aqk, (CHUNK, CHUNK), (None, 0, hv, b))
        t_u, g_u = tma(tma_u, m_u, s_u, (V_TILE, CHUNK), (v_id, None, hv, b))
        t_o, g_o = tma(tma_o, m_o, s_o, (V_TILE, CHUNK), (v_id, None, hv, b))

        # -- MMAs and fragments ------------------------------------------------------------------------------------
        mma_token = self._mma(CHUNK, OperandMajorMode.K)  # N = tokens: steps 1, 3, 4
        mma_state = self._mma(K, OperandMajorMode.MN)  # N = k: step 5
        thr_token, thr_state = mma_token.get_slice(tid), mma_state.get_slice(tid)
        b_w = mma_token.make_fragment_B(thr_token.partition_B(s_w))
        b_qg = mma_token.make_fragment_B(thr_token.partition_B(s_qg))
        b_aqk = mma_token.make_fragment_B(thr_token.partition_B(s_aqk))
        b_kg = mma_state.make_fragment_B(thr_state.partition_B(s_kg))
        r_h = cute.make_rmem_tensor(mma_state.partition_shape_C((V_TILE, K)), Float32)
        r_wh = cute.make_rmem_tensor(mma_token.partition_shape_C((V_TILE, CHUNK)), Float32)
        r_oh = cute.make_rmem_tensor_like(r_wh)
        r_oi = cute.make_rmem_tensor_like(r_wh)
        r_v = cute.make_rmem_tensor_like(r_wh, io)
        r_hb = cute.make_rmem_tensor_like(r_h, io)
        r_u = cute.make_rmem_tensor_like(r_wh, io)
        r_o = cute.make_rmem_tensor_like(r_wh, io)
        r_decay = cute.make_rmem_tensor((2, K // 8), Float32)

        # u and o move between [token, V] rows and the transposed accumulator layout with the .trans matrix copies.
        copy_u = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), io), mma_token)
        copy_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), io), mma_token)
        c_u = copy_u.get_slice(tid).partition_S(s_u)
        c_o = copy_o.get_slice(tid).partition_D(s_o)
        # A thread's accumulator columns k are the same for each of its rows: broadcast the decay along V.
        s_decay_v = cute.make_tensor(s_decay.iterator, cute.make_layout((V_TILE, K), stride=(0, 1)))
        c_decay = thr_state.partition_C(s_decay_v)[(None, 0, None), 0, 0]

        # -- h_0 -----------------------------------------------------------------------------------------------------
        coord = thr_state.partition_C(cute.make_identity_tensor((V_TILE, K)))
        if cutlass.const_expr(self.has_h0):
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                r_h[i] = h0[b, hv, coord[i][1], v_id * V_TILE + coord[i][0]]
        else:
            r_h.fill(0.0)

        for c in cutlass.range(cute.ceil_div(T, CHUNK), unroll=1):
            # -- load ------------------------------------------------------------------------------------------------
            if warp_id == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.load_bytes)
                cute.copy(tma_w, g_w[None, c], t_w, tma_bar_ptr=full)
                cute.copy(tma_qg, g_qg[None, c], t_qg, tma_bar_ptr=full)
                cute.copy(tma_kg, g_kg[None, c], t_kg, tma_bar_ptr=full)
                cute.copy(tma_aqk, g_aqk[None, c], t_aqk, tma_bar_ptr=full)
                cute.copy(tma_u, g_u[None, c], t_u, tma_bar_ptr=full)
            if tid < K:
                last = cutlass.min(c * CHUNK + (CHUNK - 1), T - 1)
                s_decay[tid] = cute.math.exp2(g2[b, last, hv, tid], fastmath=True)
            cute.arch.mbarrier_wait(full, c % 2)
            cute.arch.sync_threads()

            # -- steps 1 and 2: v' = u - w h ---------------------------------------------------------------------------
            r_hb.store(r_h.load().to(io))
            self.multiply((mma_token, r_wh, r_hb, b_w, True))
            cute.copy(copy_u, c_u, copy_u.retile(r_u))
            r_v.store((r_u.load().to(Float32) - r_wh.load()).to(io))

            # -- steps 3 and 4: o = scale qg h + Aqk v' ----------------------------------------------------------------
            self.multiply((mma_token, r_oh, r_hb, b_qg, True), (mma_token, r_oi, r_v, b_aqk, True))
            r_o.store((scale * r_oh.load() + r_oi.load()).to(io))

            # -- step 5: h = 2^G h + kg^T v' ---------------------------------------------------------------------------
            cute.autovec_copy(c_decay, r_decay)
            for n in cutlass.range_constexpr(K // 8):
                for j in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        r_h[(j, r, n), 0, 0] = r_h[(j, r, n), 0, 0] * r_decay[j, n]
            self.multiply((mma_state, r_h, r_v, b_kg, False))

            # -- store: generic writes of o become visible to the TMA engine, then one warp sends the tile -----------
            cute.copy(copy_o, copy_o.retile(r_o), c_o)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if warp_id == 0:
                with cute.arch.elect_one():
                    cute.copy(tma_o, t_o, g_o[None, c])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            # No barrier here: s_o is next written after the next chunk's sync, which warp 0 reaches past this wait.

        if cutlass.const_expr(self.write_ht):
            for i in cutlass.range(cute.size(r_h), unroll_full=True):
                ht[b, hv, coord[i][1], v_id * V_TILE + coord[i][0]] = r_h[i]

    @staticmethod
    def multiply(*products: tuple) -> None:
        """acc = (0 if zero else acc) + a b for each (mma, acc, a, b, zero), as one wgmma group, finished on return.
        `a`: an accumulator-shaped io tensor ((2,2,N/8),1,1), whose registers are the A fragment ((2,2,2),1,N/16)."""
        warpgroup.fence()
        for mma, acc, a, b, zero in products:
            n = cute.size(a) // 8
            a = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, n), stride=((1, 2, 4), 0, 8)))
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, not zero)
            for k in range(n):
                cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)


KdaState.kda_state.set_name_prefix("kda_state", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(arch: str, K: int, V: int, dtype: str = "bfloat16", has_h0: bool = True, write_ht: bool = True):
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_90a") with TVM-FFI.

    Arguments of the compiled function, all contiguous: qg, w, kg [B,T,HV,K], u [B,T,HV,V], Aqk [B,T,HV,64] in `dtype`;
    g2 [B,T,HV,K] fp32 (log2 units); h0 [B,HV,K,V] fp32 or None (has_h0 false); o [B,T,HV,V] in `dtype`; ht like h0
    or None (write_ht false); scale fp32. B, T, HV are free. ValueError: a parameter outside its domain.
    """
    if arch != "sm_90a":
        raise ValueError(f"arch: got {arch}, accepted sm_90a")
    fn = KdaState(K, V, dtype, has_h0, write_ht)
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
