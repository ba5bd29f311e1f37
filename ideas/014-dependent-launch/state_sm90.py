"""KDA state scan and output in one kernel, Hopper (sm_90a): 003's pipeline, the sequence cut into segments, launched beside prep.

One CTA takes one segment of `length` chunks of one (batch b, value head hv, V tile of 64 or 128): it first *walks*
the chunks before the segment as far back as it must, updating the state only, then runs its own chunks with output.
Where the walk starts is decided here, from one float a chunk that the preparation left:

    fade_c = sum over the chunk's tokens of log2 of the bound on what a token leaves of any state   (ALGORITHM.md, 19)
    start  = the latest chunk with fade_start + .. + fade_begin-1 <= CLOSED, from state 0;  else chunk 0, from h0

so a state dropped at `start` has come down by 2^CLOSED, to less than fp32 holds, when the segment begins, and where no
such chunk exists nothing is dropped: the walk then repeats the serial recurrence operation by operation, and the
segment's bits are those of an undivided run. start depends on earlier chunks only, the segments on shapes only.

Per chunk of 64 tokens (^T marks what the registers hold; io = bf16 or fp16; accumulation is fp32):

    product  equation                      as issued                                rounding
    WH       WH  = w h                     -v'^T = -u^T + io(h^T) w^T               h to io
    OH       OH  = qg h                    OH^T  = io(h^T) qg^T                     h to io (the same copy)
    (v')     v'  = u - WH                  v'^T  = -io(-v'^T)                       v' to io
    DH       h_k = 2^G_k h_k + (kg^T v')_k h^T   = h^T diag(2^G) + v'^T kg          none: h stays fp32
    OI       o   = scale OH + Aqk v'       o^T   = scale OH^T + v'^T Aqk^T          o to io at the store

A walked chunk has WH, v' and DH only, and loads neither qg nor Aqk. G is gl, the log2 decay of the whole chunk. After
the last chunk of the sequence h is written to `ht`. Where T is no multiple of 64 TMA fills rows past T with zeros (v' =
0 there) and clips them in o. Aqk must be finite on the whole tile and zero above the diagonal: the product contracts
all of it. Issue order, layouts and the reasons for them: recurrence.py.

    warps            role        does                                        registers
    all              -           each finds `start`: 32 chunks a step, one a lane
    0                LOAD        TMA: w (qg) | gl row, u | kg (Aqk)          40 (setmaxnreg; warp 3 idles)
    1                DECAY       2^G, once a chunk instead of once a thread
    2                STORE       TMA: o; walked chunks: only frees the slot
    4-7 (and 8-11)   RECURRENCE  every product; h^T, v'^T, o^T               240 (232 with two warpgroups)

    MMA (M = 64, A from registers): WH, OH m64n64k16 x K/16 each; DH m64nKk16 x 4; OI m64n64k16 x 4

    mbarrier   ring  count            arrives                               waits
    full       in    2 + bytes + 32   LOAD (w, qg; u), DECAY (32 lanes)     RECURRENCE before it fetches
    empty_wq   in    warps            RECURRENCE, a lane a warp, OH (walk:  LOAD
                                      WH) done
    full_ka    in    1 + bytes        LOAD                                  RECURRENCE before DH
    empty_ka   in    warps            RECURRENCE, a lane a warp, OI (walk:  LOAD
                                      DH) done
    full_g     u     1 + bytes        LOAD                                  DECAY
    full_o     u     32 warps         RECURRENCE, every lane: o written, or STORE; DECAY before it writes again
                                      u and the decay fetched (walk)
    empty_u    u     1                STORE, once o has left the slot       LOAD (covers gl row, u, o)
    warps = 4 a recurrence warpgroup. `bar.sync 0` only once, after the barriers' initialisation. The async-proxy fence
    between stmatrix and the TMA store stands in STORE, after its wait: the fence may be anywhere on the path (PTX ISA,
    "Causality Order": proxy-preserved base causality order), and there it delays no product.

The launch is a dependent one: a CTA may begin once all of prep's have begun, as soon as an SM has room for it. It sets up
what is its own, then waits for prep's end (PTX ISA, griddepcontrol), before any read of global memory and any write to it.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from .fade import first_chunk
from .recurrence import WG_V, Recurrence

CHUNK = 64
IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Role(enum.IntEnum):
    """Warp index of each single-warp role; every warp from RECURRENCE on belongs to a recurrence warpgroup."""

    LOAD = 0
    DECAY = 1
    STORE = 2
    RECURRENCE = 4


STAGES = {64: (3, 4), 128: (2, 4)}  # by V tile: slots of the rings `in` (w qg kg Aqk), `u` (u, o, gl, decay)
IN_BARRIERS = ("full", "empty_wq", "full_ka", "empty_ka")
U_BARRIERS = ("full_g", "full_o", "empty_u")


class KdaState(Recurrence):
    """The jit function of one static configuration (see `build`)."""

    def __init__(self, K: int, V: int, dtype: str, segmented: bool, has_h0: bool, write_ht: bool, v_tile: int):
        if K not in (64, 128):
            raise ValueError(f"K: got {K}, accepted 64 or 128")
        if v_tile not in (64, 128):
            raise ValueError(f"v_tile: got {v_tile}, accepted 64 or 128")
        if V <= 0 or V % v_tile:
            raise ValueError(f"V: got {V}, accepted a positive multiple of v_tile = {v_tile}")
        if dtype not in IO:
            raise ValueError(f"dtype: got {dtype}, accepted {' or '.join(IO)}")
        self.K, self.V, self.io, self.has_h0, self.write_ht = K, V, IO[dtype], has_h0, write_ht
        self.segmented = segmented
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
        kg: cute.Tensor,  # [B, T, HV, K] io: k 2^(gl - g2)
        u: cute.Tensor,  # [B, T, HV, V] io
        aqk: cute.Tensor,  # [B, T, HV, 64] io, scale folded in, zero above the diagonal
        gl: cute.Tensor,  # [B, NT, HV, K] fp32, log2 decay of each chunk
        fade: cute.Tensor | None,  # [B, NT, HV] fp32, log2 bound on a chunk's transition, or None: one segment
        h0: cute.Tensor | None,  # [B, HV, K, V] fp32, or None without has_h0
        o: cute.Tensor,  # [B, T, HV, V] io, written
        ht: cute.Tensor | None,  # [B, HV, K, V] fp32, written, or None without write_ht
        scale: Float32,
        length: Int32,  # chunks a segment; NT or more: one segment
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
        tma_g, m_g = cpasync.make_tiled_tma_atom(load, columns(gl), one(lay.g), (K, 1))
        tma_o, m_o = cpasync.make_tiled_tma_atom(store, columns(o), one(lay.u), (VT, CHUNK))
        self.bytes_w = cute.size_in_bytes(io, one(lay.w))  # and of qg
        self.bytes_k = cute.size_in_bytes(io, one(lay.kg))
        self.bytes_a = cute.size_in_bytes(io, one(lay.aqk))
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
            tma_qg, m_qg, tma_w, m_w, tma_kg, m_kg, tma_aqk, m_aqk, tma_u, m_u, tma_g, m_g, tma_o, m_o, fade, h0, ht,
            scale, length,
        ).launch(
            grid=(B * HV * (self.V // VT), cute.ceil_div(gl.shape[1], length), 1), block=(self.threads, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

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
        fade: cute.Tensor | None,
        h0: cute.Tensor | None,
        ht: cute.Tensor | None,
        scale: Float32,
        length: Int32,
    ):
        K, VT = self.K, self.v_tile
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bid, segment, _ = cute.arch.block_idx()
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
        cute.arch.griddepcontrol_wait()  # for prep, whose end the launch did not wait for
        start, begin, end = Int32(0), Int32(0), chunks
        if cutlass.const_expr(self.segmented):
            begin = segment * length
            end = cutlass.min(begin + length, chunks)
            start = first_chunk(fade, b, hv, begin)
        span = SimpleNamespace(start=start, begin=begin, end=end, chunks=chunks)

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
                span,
            )
        elif warp_id == Role.DECAY:
            cute.arch.setmaxregister_decrease(self.regs_other)
            self.decay(s_g, s_decay, bars, span)
        elif warp_id == Role.STORE:
            cute.arch.setmaxregister_decrease(self.regs_other)
            self.store(tma(tma_o, m_o, s_u, (VT, CHUNK), (v_id, None, hv, b)), bars, span)
        elif warp_id < Role.RECURRENCE:
            cute.arch.setmaxregister_decrease(self.regs_other)
        else:
            cute.arch.setmaxregister_increase(self.regs_recurrence)
            group = (warp_id - Role.RECURRENCE) // 4
            v0 = v_id * VT + group * WG_V
            s_u_wg = cute.local_tile(s_u, (WG_V, CHUNK), (group, 0, None))
            self.recurrence(s_w, s_qg, s_kg, s_aqk, s_u_wg, s_decay, bars, span, h0, ht, b, hv, v0, scale)

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
    def load(self, w, qg, kg, aqk, u, g, bars, span):
        """A chunk more than the span: RECURRENCE fetches one ahead. Past T TMA writes zeros, reading nothing; a zero
        row of gl is a decay of 1."""
        stage, phase, u_stage, u_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for c in cutlass.range(span.start, span.end + 1, unroll=1):
            full, full_ka, full_g = bars.full + stage, bars.full_ka + stage, bars.full_g + u_stage
            bytes_wq, bytes_ka, at = Int32(2 * self.bytes_w), Int32(self.bytes_k + self.bytes_a), c
            if c < span.begin:
                bytes_wq, bytes_ka = Int32(self.bytes_w), Int32(self.bytes_k)
            if c == span.end:
                at = span.chunks
            self.fill(bars.empty_wq + stage, full, bytes_wq, phase)
            cute.copy(w.atom, w.gmem[None, at], w.smem[None, stage], tma_bar_ptr=full)
            if c >= span.begin:
                cute.copy(qg.atom, qg.gmem[None, at], qg.smem[None, stage], tma_bar_ptr=full)

            self.fill(bars.empty_u + u_stage, full, Int32(self.bytes_u), u_phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_g, self.bytes_g)
            cute.copy(g.atom, g.gmem[None, at], g.smem[None, u_stage], tma_bar_ptr=full_g)
            cute.copy(u.atom, u.gmem[None, at], u.smem[None, u_stage], tma_bar_ptr=full)

            if c < span.end:
                self.fill(bars.empty_ka + stage, full_ka, bytes_ka, phase)
                cute.copy(kg.atom, kg.gmem[None, c], kg.smem[None, stage], tma_bar_ptr=full_ka)
                if c >= span.begin:
                    cute.copy(aqk.atom, aqk.gmem[None, c], aqk.smem[None, stage], tma_bar_ptr=full_ka)
            stage, phase = self.advance(stage, phase, self.stages)
            u_stage, u_phase = self.advance(u_stage, u_phase, self.u_stages)

    @cute.jit
    def fill(self, empty: cute.Pointer, full: cute.Pointer, bytes: Int32, phase: Int32):
        """Wait until the slot is free (at once on the first lap), then announce what TMA will write to it."""
        cute.arch.mbarrier_wait(empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, bytes)

    @cute.jit
    def decay(self, s_g: cute.Tensor, s_decay: cute.Tensor, bars, span):
        """decay = 2^G, in the slot of the row it comes from.

        full_g comes after empty_u, which comes after full_o, so the first wait never blocks. It names the readers'
        own arrivals as what frees the slot; racecheck follows no chain through other roles and TMA."""
        lane = cute.arch.lane_idx()
        stage, phase, u_stage, u_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for _ in cutlass.range(span.start, span.end + 1, unroll=1):
            cute.arch.mbarrier_wait(bars.full_o + u_stage, u_phase ^ 1)  # RECURRENCE has read the decay before
            cute.arch.mbarrier_wait(bars.full_g + u_stage, u_phase)
            for i in cutlass.range_constexpr(self.K // 32):
                k = i * 32 + lane
                s_decay[k, 0, u_stage] = cute.math.exp2(s_g[k, 0, u_stage], fastmath=True)
            cute.arch.mbarrier_arrive(bars.full + stage)
            stage, phase = self.advance(stage, phase, self.stages)
            u_stage, u_phase = self.advance(u_stage, u_phase, self.u_stages)

    @cute.jit
    def store(self, o, bars, span):
        stage, phase = Int32(0), Int32(0)
        for c in cutlass.range(span.start, span.end, unroll=1):
            cute.arch.mbarrier_wait(bars.full_o + stage, phase)
            cute.arch.fence_proxy("async.shared", space="cta")
            with cute.arch.elect_one():
                if c >= span.begin:
                    cute.copy(o.atom, o.smem[None, stage], o.gmem[None, c])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(bars.empty_u + stage)
            stage, phase = self.advance(stage, phase, self.u_stages)


KdaState.kda_state.set_name_prefix("kda_state", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(arch: str, K: int, V: int, dtype: str = "bfloat16", segmented: bool = True, has_h0: bool = True,
          write_ht: bool = True, v_tile: int = 64):  # fmt: skip
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_90a") with TVM-FFI.

    v_tile: V columns a CTA walks. 128 (two warpgroups) moves the fewest bytes; 64 gives twice the CTAs, and is faster
    while those fit the GPU's SMs. Arguments of the compiled function, all contiguous: qg, w, kg [B,T,HV,K],
    u [B,T,HV,V], Aqk [B,T,HV,64] in `dtype`; gl [B,NT,HV,K] fp32 (log2 units); fade [B,NT,HV]
    fp32 (log2 units) or None (segmented false: one segment, no walk); h0 [B,HV,K,V] fp32 or None (has_h0 false);
    o [B,T,HV,V] in `dtype`; ht like h0 or None (write_ht false); scale fp32; length int32, chunks a segment (NT where
    not segmented). B, T, HV are free.
    ValueError: a parameter outside its domain.
    """
    if arch != "sm_90a":
        raise ValueError(f"arch: got {arch}, accepted sm_90a")
    fn = KdaState(K, V, dtype, segmented, has_h0, write_ht, v_tile)
    B, T, HV, NT = (cute.sym_int() for _ in range(4))

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
        fake(Float32, B, NT, HV, K),
        make_fake_compact_tensor(Float32, (B, NT, HV), stride_order=(2, 1, 0)) if segmented else None,
        state() if has_h0 else None,
        values(),
        state() if write_ht else None,
        Float32(1.0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return fn, args
