"""KDA chunk preparation in one kernel, Hopper and Blackwell: raw q, k, v, gate and beta in; what the state kernel needs out.

One CTA takes one chunk of C = 64 tokens of one value head. Rows form four blocks of 16; all decays are in log2 units.

    l       log decay of a row and channel, 0 for rows past T;  L = its inclusive cumsum inside the block
    P_b     cumsum of the blocks before b (P_4: whole chunk);    G = P_b + L;   N_b = ceil(P_b), the anchor of block b
    qF      q 2^(G - N_b)            kF  k 2^(G - N_b)           at most 1, rounded to io once
    kD      k 2^(N_b - G)            bounded gates: at most 2^117, so bf16 only
    kE      k 2^(N_b+1 - G)          other gates and fp16: at most 2
    Aqk     scale (qF_i . kD_j 2^(N_a - N_b))        i in block a, j in block b <= a, j < i; scale (q_i . k_i) for j = i
    L_ij    beta_i (kF_i . kD_j 2^(N_a - N_b))       j < i;      A = (I + L)^-1
    w, u    (A diag(beta)) (kF 2^N_b),  (A diag(beta)) v
    qg, kg  qF 2^N_b,  k 2^(P_4 - G);   gl = P_4;   fade: fade.py

Anchors are whole numbers, so every 2^(N_a - N_b) is a power of two and scales a rounded operand exactly: three rounded
tiles (qF, kF, kD) serve all products and qg. An anchor is a cumsum over rows before the block: no output of a row
depends on a later row, bitwise (kg and gl are those of the whole chunk by definition). Only kD's exponent is positive,
and bounded by 16 tokens of 5 nats. Without that bound the diagonal blocks go dyadically, from raw q and k: at level
s = 8, 4, 2, 1 a pair (i, j) whose highest differing bit is s has the last row m - 1 of the earlier half as anchor,
j <= m - 1 < i, and both 2^(L_i - L_m-1) and 2^(L_m-1 - L_j) are at most 1; off-diagonal products use kE.

    phase                        who                          reads                     leaves (shared memory)
    load                         TMA (warp 0)                 q, k, v                   q, k, v tiles
    A1 gate, cumsum              thread = 2 channels x block  g (global)                L (registers), block totals
       row norms, q_i . k_i      warp = block x (q or k)      q, k                      norms, dots; beta; (peaks, fade)
    (A1' dyadic diagonal)        warp = block x levels        q, k, L (over kD, v)      scores in registers; then load v
    A2 operands                  thread = 2 channels x block  q, k                      qF over q, kF over k, kD; scales
                                                                                        qg, kg, gl to global memory
    B  scores                    warp = block pair            qF, kF, kD                Aqk; -L as two bf16; L fp32
    D  diagonal inverses         warps 0-3, lane = column     L fp32                    D split; A^T diagonal blocks, their
                                                                                        low parts over L
       kF 2^N over kF; Aqk out   warps 4-7 (or the same)      kF; Aqk
    E  off-diagonal inverse      warp 0-2 = block column      -L, D                     A^T
    F  w, u                      4 warps = 64 columns         A^T, kF 2^N, v            w over k, u over v; TMA store

Tiles are [64 rows][64 columns] of io, 128-byte rows, 16-byte chunk c of row r at chunk c ^ (r % 8) (TMA's 128-byte
swizzle), wider ones a sequence of such. D by forward substitution in fp32; the block products of E take both factors
as two bf16 each (hi hi + hi lo + lo hi, fp32 accumulation). beta stands in the columns of A^T; F takes its diagonal
blocks in two parts as well, the others in one. Products: mma.sync m16n8k16; on Hopper wgmma m64n64k16 for all of F but
the low parts (products.py: nothing else differs between architectures). A^T is transposed on its way into registers.

mbarriers: qk and v, one phase each: count 1 + bytes, TMA arrives, all threads wait. bar.sync 0 between phases;
bar.sync 1 + g inside F among the 128 threads of its group g of four warps.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from . import ptx
from .dyadic import Dyadic
from .fade import Fade
from .inverse import Inverse
from .operands import Operands
from .products import Products
from .scores import Scores
from .tiles import BLOCK, CHUNK, PAIRS, TILE

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT = {**IO, "float32": Float32}


class KdaPrep(Operands, Dyadic, Scores, Inverse, Products, Fade):
    """The jit function of one static configuration (see `build`)."""

    def __init__(
        self, arch, K, V, dtype, gate, bounded, l2norm, beta_sigmoid, g_dtype, beta_dtype, dt_bias, fades, ctas
    ):  # fmt: skip
        for name, value, accepted in (
            ("arch", arch, ARCHS), ("K", K, (64, 128)), ("dtype", dtype, tuple(IO)), ("gate", gate, ("log", "softplus", "safe")),
            ("g_dtype", g_dtype, (dtype, "float32")), ("beta_dtype", beta_dtype, (dtype, "float32")),
        ):  # fmt: skip
            if value not in accepted:
                raise ValueError(f"{name}: got {value}, accepted {' or '.join(map(str, accepted))}")
        if V <= 0 or V % 64:
            raise ValueError(f"V: got {V}, accepted a positive multiple of 64")
        self.warpgroups = arch == "sm_90a"
        self.K, self.V, self.io, self.pair = K, V, IO[dtype], {"bfloat16": "bf16", "float16": "f16"}[dtype]
        self.gate, self.l2norm, self.beta_sigmoid, self.dt_bias = gate, l2norm, beta_sigmoid, dt_bias
        self.g_words = 2 if g_dtype == "float32" else 1  # of a thread's two channels
        self.g_element, self.beta_element = ELEMENT[g_dtype], ELEMENT[beta_dtype]
        self.dyadic = not bounded or dtype == "float16"
        self.fades, self.growth = fades, fades and not (l2norm and beta_sigmoid)
        self.warps = K // 16  # a thread per channel pair and block
        self.threads = 32 * self.warps
        self.groups = self.warps // 4
        self.tiles = (K + V) // 64
        self.operand = max(2, K // 64) * TILE  # bytes of the q and the kD tile; later two score tiles each
        # L in fp32 takes 16 KB for 64 channels: the kD tile, and for the others v's tiles or, where V = 64, its own
        self.local = 2 * TILE if self.dyadic and K > 64 and V == 64 else 0
        shared = 2 * self.operand + self.tiles * TILE + 40 * K + self.local + 6400 + (512 if fades else 0)
        self.ctas = min(3, 233472 // shared) if ctas is None else ctas

    # ---- host ------------------------------------------------------------------------------------------------------

    def _tiles(self, n: int, columns: int) -> cute.ComposedLayout:
        """(64 tokens, columns, n): `columns` and n in sequence of 64-wide tiles."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.io)
        return cute.tile_to_shape(atom, (CHUNK, columns, n), order=(0, 1, 2))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [B, T, H, K] io
        k: cute.Tensor,  # [B, T, H, K] io
        v: cute.Tensor,  # [B, T, HV, V] io
        g: cute.Tensor,  # [B, T, HV, K]: ln decay (gate "log") or raw
        beta: cute.Tensor,  # [B, T, HV], or its logits
        a_log: cute.Tensor | None,  # [HV] fp32, None for gate "log"
        dt_bias: cute.Tensor | None,  # [HV * K] fp32 or None
        qg: cute.Tensor,  # [B, T, HV, K] io, written, as are all that follow
        kg: cute.Tensor,  # [B, T, HV, K] io
        w: cute.Tensor,  # [B, T, HV, K] io
        u: cute.Tensor,  # [B, T, HV, V] io
        aqk: cute.Tensor,  # [B, T, HV, 64] io
        gl: cute.Tensor,  # [B, NT, HV, K] fp32: log2 decay of the whole chunk
        fade: cute.Tensor | None,  # [B, NT, HV] fp32: log2 bound on the chunk's transition, or None: not wanted
        scale: Float32,
        lower_bound: Float32,  # ln units, gate "safe"
        stream,
    ):
        K, V, io = self.K, self.V, self.io

        def rows(x):  # [B, T, heads, D] seen as (T, D, heads, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))

        def one(columns):
            return cute.slice_(self._tiles(1, columns), (None, None, 0))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, m_q = cpasync.make_tiled_tma_atom(load, rows(q), one(K), (CHUNK, K))
        tma_k, m_k = cpasync.make_tiled_tma_atom(load, rows(k), one(K), (CHUNK, K))
        tma_v, m_v = cpasync.make_tiled_tma_atom(load, rows(v), one(64), (CHUNK, 64))
        tma_w, m_w = cpasync.make_tiled_tma_atom(store, rows(w), one(64), (CHUNK, 64))
        tma_u, m_u = cpasync.make_tiled_tma_atom(store, rows(u), one(64), (CHUNK, 64))
        tma_a, m_a = cpasync.make_tiled_tma_atom(store, rows(aqk), one(64), (CHUNK, CHUNK))

        def block(dtype, n):
            return cute.struct.Align[cute.struct.MemRange[dtype, n], 1024]

        def small(n):
            return cute.struct.Align[cute.struct.MemRange[Float32, n], 128]

        @cute.struct
        class SharedStorage:
            q: block(io, self.operand // 2)
            kd: block(io, self.operand // 2)
            kv: block(io, self.tiles * TILE // 2)
            scales: small(len(PAIRS) * K // 2)
            totals: small(4 * K)
            norms: small(2 * CHUNK)
            beta: small(CHUNK)
            dots: small(CHUNK)
            diagonal: small(4 * BLOCK * BLOCK)
            local: small(max(1, self.local // 4))
            fades: small(2 * CHUNK if self.fades else 1)
            barriers: cute.struct.MemRange[Int64, 2]

        self.storage = SharedStorage
        group = g.shape[2] // q.shape[2]  # value heads a q/k head; hv // group as a product, exact for HV < 65536
        inverse = (Int64(1 << 32) + group - 1) // group
        self.kda_prep(
            tma_q, m_q, tma_k, m_k, tma_v, m_v, tma_w, m_w, tma_u, m_u, tma_a, m_a, g, beta, a_log, dt_bias, qg, kg, gl,
            fade, inverse, scale, lower_bound,
        ).launch(
            grid=(g.shape[2], gl.shape[1], g.shape[0]), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.ctas, preferred_smem_carveout=100,
        )  # fmt: skip

    # ---- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kda_prep(
        self,
        tma_q: cute.CopyAtom,
        m_q: cute.Tensor,
        tma_k: cute.CopyAtom,
        m_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        m_v: cute.Tensor,
        tma_w: cute.CopyAtom,
        m_w: cute.Tensor,
        tma_u: cute.CopyAtom,
        m_u: cute.Tensor,
        tma_a: cute.CopyAtom,
        m_a: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        qg: cute.Tensor,
        kg: cute.Tensor,
        gl: cute.Tensor,
        fade: cute.Tensor | None,
        inverse: Int64,
        scale: Float32,
        lower_bound: Float32,
    ):
        cute.arch.griddepcontrol_launch_dependents()  # the state kernel waits for this one's end, and may be there by then
        K = self.K
        hv, chunk, b = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        T, HV, NT = g.shape[1], g.shape[2], gl.shape[1]
        head = Int32((Int64(hv) * inverse) >> 32)
        valid = cutlass.min(T - chunk * CHUNK, CHUNK)

        smem = SmemAllocator().allocate(self.storage)
        bar = smem.barriers.data_ptr()
        lay_q, lay_kv, lay_a = self._tiles(1, K), self._tiles(self.tiles, 64), self._tiles(1, CHUNK)
        s_q = smem.q.get_tensor(lay_q.outer, swizzle=lay_q.inner)
        s_kv = smem.kv.get_tensor(lay_kv.outer, swizzle=lay_kv.inner)
        s_k = smem.kv.get_tensor(lay_q.outer, swizzle=lay_q.inner)
        s_a = smem.kd.get_tensor(lay_a.outer, swizzle=lay_a.inner)

        def tma(atom, tensor, smem_tile, shape, coord):
            tile = cute.local_tile(tensor, shape, coord)
            s, t = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(smem_tile, 0, 2), cute.group_modes(tile, 0, 2)
            )
            return SimpleNamespace(atom=atom, smem=s, gmem=t)

        load_q = tma(tma_q, m_q, s_q, (CHUNK, K), (None, 0, head, b))
        load_k = tma(tma_k, m_k, s_k, (CHUNK, K), (None, 0, head, b))
        load_v = tma(tma_v, m_v, s_kv, (CHUNK, 64), (chunk, None, hv, b))
        out_w = tma(tma_w, m_w, s_kv, (CHUNK, 64), (chunk, None, hv, b))
        out_u = tma(tma_u, m_u, s_kv, (CHUNK, 64), (chunk, None, hv, b))
        out_a = tma(tma_a, m_a, s_a, (CHUNK, CHUNK), (None, 0, hv, b))
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bar, 1)
                cute.arch.mbarrier_init(bar + 1, 1)
            cute.arch.mbarrier_init_fence()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * CHUNK * K * 2)
            cute.copy(load_q.atom, load_q.gmem[None, chunk], load_q.smem[None, 0], tma_bar_ptr=bar)
            cute.copy(load_k.atom, load_k.gmem[None, chunk], load_k.smem[None, 0], tma_bar_ptr=bar)
            if cutlass.const_expr(not self.dyadic):
                self.load_values(load_v, bar + 1)

        half, blk = warp % (K // 64), warp // (K // 64)
        channel = half * 64 + 2 * lane
        x = SimpleNamespace(
            tid=tid, warp=warp, lane=lane, blk=blk, channel=channel, live=valid - BLOCK * blk, valid=valid,
            q=smem.q.data_ptr().toint(), kd=smem.kd.data_ptr().toint(), k=smem.kv.data_ptr().toint(),
            scales=smem.scales.data_ptr().toint(), totals=smem.totals.data_ptr().toint(),
            norms=smem.norms.data_ptr().toint(), beta=smem.beta.data_ptr().toint(), dots=smem.dots.data_ptr().toint(),
            diagonal=smem.diagonal.data_ptr().toint(), fades=smem.fades.data_ptr().toint(), scale=scale,
            local=[smem.kd.data_ptr().toint(), smem.local.data_ptr().toint()], stride=Int64(HV * K),
        )  # fmt: skip
        if cutlass.const_expr(not self.local):
            x.local[1] = x.k + K // 64 * TILE
        token = Int64(b) * T + chunk * CHUNK
        element = ((token + BLOCK * blk) * HV + hv) * K + channel  # of this thread's first row in g, qg, kg
        x.element = element

        # -- A1 ------------------------------------------------------------------------------------------------------
        raw = self.fetch_gate(x, g.iterator.toint() + element * (2 * self.g_words))
        self.load_beta(x, beta, token, HV, hv)
        x.sums, peaks = self.cumulate(x, raw, self.gate_coefficients(x, a_log, dt_bias, hv, lower_bound))
        if cutlass.const_expr(self.fades):
            self.store_peaks(x, peaks)
        ptx.sts_vec(x.totals + (blk * K + channel) * 4, x.sums[BLOCK - 1])
        if cutlass.const_expr(self.dyadic):
            self.store_local(x)
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(bar, 0)
        if cutlass.const_expr(self.l2norm or self.growth):
            self.row_norms(x)
        if cutlass.const_expr(not self.dyadic):
            if warp < 4:
                self.row_dots(x)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.fades):
            if warp == self.warps - 1:
                self.store_fade(x, fade, (Int64(b) * NT + chunk) * HV + hv)
        if cutlass.const_expr(self.dyadic):
            scores = self.diagonal_scores(x)
            x.sums = self.load_local(x)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if warp == 0:
                self.load_values(load_v, bar + 1)

        # -- A2 ------------------------------------------------------------------------------------------------------
        self.operands(x, qg, kg)
        if blk == 3:
            self.store_decay(x, gl, ((Int64(b) * NT + chunk) * HV + hv) * K + channel)
        cute.arch.sync_threads()

        # -- B -------------------------------------------------------------------------------------------------------
        if cutlass.const_expr(not self.dyadic):
            scores = [self.pair_scores(x, x.warp + self.warps * n) for n in range(8 // self.warps)]
        first = 4 if self.dyadic else 8
        strips = [self.strip_scores(x, x.warp + self.warps * n, first) for n in range(4 * (10 - first) // self.warps)]
        cute.arch.sync_threads()
        self.clear_upper(x)
        if cutlass.const_expr(self.dyadic):
            self.put_diagonal(x, scores)
        else:
            for n in cutlass.range_constexpr(8 // self.warps):
                self.put_pair(x, scores[n], x.warp + self.warps * n)
        for n in cutlass.range_constexpr(len(strips)):
            self.put_strip(x, strips[n], x.warp + self.warps * n, first)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        # -- D -------------------------------------------------------------------------------------------------------
        if warp == self.warps - 1:
            with cute.arch.elect_one():
                cute.copy(out_a.atom, out_a.smem[None, 0], out_a.gmem[None, chunk])
                cute.arch.cp_async_bulk_commit_group()
        if warp < 4:
            self.invert_diagonal(x)
        if warp >= self.warps - 4:
            self.scale_keys(x, x.tid - (self.threads - 128))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        # -- E -------------------------------------------------------------------------------------------------------
        for column in cutlass.range_constexpr(3):
            if warp == column:
                self.invert_column(x, column)
        cute.arch.sync_threads()

        # -- F -------------------------------------------------------------------------------------------------------
        group = warp // 4
        p = self.product_operands(x, smem.kv)
        for t in cutlass.range(group, self.tiles, self.groups, unroll=1):
            if t >= K // 64:
                cute.arch.mbarrier_wait(bar + 1, 0)
            self.product(p, t)
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            self.put_output(p, t)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            if warp % 4 == 0:
                with cute.arch.elect_one():
                    if t < K // 64:
                        cute.copy(out_w.atom, out_w.smem[None, t], out_w.gmem[None, t])
                    else:
                        cute.copy(out_u.atom, out_u.smem[None, t], out_u.gmem[None, t - K // 64])
                    cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_values(self, v, bar: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, CHUNK * self.V * 2)
        for j in cutlass.range_constexpr(self.V // 64):
            cute.copy(v.atom, v.gmem[None, j], v.smem[None, self.K // 64 + j], tma_bar_ptr=bar)


KdaPrep.kda_prep.set_name_prefix("kda_prep", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(
    arch: str,
    K: int,
    V: int,
    dtype: str = "bfloat16",
    gate: str = "safe",
    bounded: bool = True,
    l2norm: bool = True,
    beta_sigmoid: bool = True,
    g_dtype: str = "bfloat16",
    beta_dtype: str = "bfloat16",
    dt_bias: bool = True,
    fades: bool = True,
    ctas: int | None = None,
):
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` (one of ARCHS) with TVM-FFI.

    gate: "log", "softplus" or "safe"; bounded: natural-log decays lie in [-5, 0] (implied by "safe", the caller's
    promise with "log"). dt_bias: whether there is one; fades: whether `fade` is wanted. ctas: per SM, which caps the
    registers (by default as many as shared memory allows, up to 3). Arguments of the compiled function: those of
    KdaPrep.__call__, contiguous; B, T, H, HV are free.
    ValueError: a parameter outside its domain.
    """
    fn = KdaPrep(arch, K, V, dtype, gate, bounded, l2norm, beta_sigmoid, g_dtype, beta_dtype, dt_bias, fades, ctas)
    B, T, H, HV, NT, flat = (cute.sym_int() for _ in range(6))

    def fake(element, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16)

    keys, values, scores = (fake(fn.io, B, T, HV, n) for n in (K, V, CHUNK))
    raw = gate != "log"
    args = (
        fake(fn.io, B, T, H, K), fake(fn.io, B, T, H, K), values, fake(fn.g_element, B, T, HV, K),
        make_fake_compact_tensor(fn.beta_element, (B, T, HV), stride_order=(2, 1, 0)),
        fake(Float32, HV) if raw else None, fake(Float32, flat) if raw and dt_bias else None,
        keys, keys, keys, values, scores, fake(Float32, B, NT, HV, K),
        make_fake_compact_tensor(Float32, (B, NT, HV), stride_order=(2, 1, 0)) if fades else None,
        Float32(1.0), Float32(-5.0), make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip
    return fn, args
