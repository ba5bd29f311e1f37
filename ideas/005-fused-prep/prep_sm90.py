"""KDA chunk preparation in one kernel, Hopper (sm_90a): raw q, k, v, gate and beta in; what the state kernel needs out.

One CTA takes one chunk of C = 64 tokens of one value head. Rows form four blocks of 16; all decays are in log2 units.

    l       log decay of a row and channel, 0 for rows past T;  L = its inclusive cumsum inside the block
    P_b     cumsum of the blocks before b (P_4: whole chunk);    G = P_b + L;   N_b = ceil(P_b), the anchor of block b
    qF      q 2^(G - N_b)            kF  k 2^(G - N_b)           at most 1, rounded to io once
    kD      k 2^(N_b - G)            bounded gates: at most 2^117, so bf16 only
    kE      k 2^(N_b+1 - G)          other gates and fp16: at most 2
    Aqk     scale (qF_i . kD_j 2^(N_a - N_b))        i in block a, j in block b <= a, j <= i
    L_ij    beta_i (kF_i . kD_j 2^(N_a - N_b))       j < i;      A = (I + L)^-1
    w, u    (A diag(beta)) (kF 2^N_b),  (A diag(beta)) v
    qg, kg  qF 2^N_b,  k 2^(P_4 - G);   gl = P_4

Anchors are whole numbers, so every 2^(N_a - N_b) is a power of two and scales a rounded operand exactly: three rounded
tiles (qF, kF, kD) serve all products and qg. An anchor is a cumsum over rows before the block: no output of a row
depends on a later row, bitwise (kg and gl are those of the whole chunk by definition). No exponent is positive but kD's,
bounded by 16 tokens of 5 nats. Without that bound the diagonal blocks are done dyadically from raw q and k: at level
s = 8, 4, 2, 1 a pair (i, j) whose highest differing bit is s has the last row m - 1 of the earlier half as anchor,
j <= m - 1 < i, and both 2^(L_i - L_m-1) and 2^(L_m-1 - L_j) are at most 1; off-diagonal products use kE.

    phase                        who                          reads                     leaves (shared memory)
    load                         TMA (warp 0)                 q, k, v                   q, k, v tiles
    A1 gate, cumsum              thread = 2 channels x block  g (global)                L (registers), block totals
       row norms, beta           warp = block x (q or k)      q, k                      nrm, beta
    (A1' dyadic diagonal)        warp = block x levels        q, k, L tile              scores in registers
    A2 operands                  thread = 2 channels x block  q, k                      qF over q, kF over k, kD; scales
                                                                                        qg, kg, gl to global memory
    B  scores                    warp = block pair            qF, kF, kD                Aqk; -L split in two bf16; L fp32
    D  diagonal inverses         warps 0-3, lane = column     L fp32                    D split; A^T diagonal blocks
       kF 2^N over kF; Aqk out   warps 4-7 (or the same)      kF; Aqk
    E  off-diagonal inverse      warp 0-2 = block column      -L, D                     A^T
    F  w, u                      warpgroup = 64 columns       A^T, kF 2^N, v            w over k, u over v; TMA store

Tiles are [64 rows][64 columns] of io, 128-byte rows, 16-byte chunk c of row r at chunk c ^ (r % 8) (TMA's 128-byte
swizzle), wider ones a sequence of such. D by forward substitution in fp32; the block products of E take both factors
as two bf16 each (hi hi + hi lo + lo hi, fp32 accumulation). Products: mma.sync m16n8k16 in A1, A1', B, E; wgmma
m64n64k16 in F, A^T transposed on its way into registers.

mbarriers: qk and v, one phase each: count 1 + bytes, TMA arrives, all threads wait. bar.sync 0 between phases;
bar.sync 1 + g inside F among the 128 threads of warpgroup g.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, select_
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from . import ptx
from .dyadic import Dyadic

CHUNK, BLOCK = 64, 16
ROW = 128  # bytes of a tile row
TILE = CHUNK * ROW
IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT = {**IO, "float32": Float32}
LOG2E = math.log2(math.e)
FLOOR = -256.0  # log2 decay of one token below which it is 0 anyway; keeps differences of sums exact
PAIRS = ((0, 0), (1, 1), (2, 2), (3, 3), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))  # (query block, key block)


def code(values) -> int:
    """Numbers 0..3 as two bits each, to be looked up by a register."""
    return sum(v << (2 * i) for i, v in enumerate(values))


def pick(index: Int32, values):
    """values[index] for an index in a register."""
    out = values[-1]
    for j in reversed(range(len(values) - 1)):
        out = select_(index == j, values[j], out)
    return out


class KdaPrep(Dyadic):
    """The jit function of one static configuration (see `build`)."""

    def __init__(self, K, V, dtype, gate, bounded, l2norm, beta_sigmoid, g_dtype, beta_dtype, dt_bias, ctas):
        for name, value, accepted in (
            ("K", K, (64, 128)), ("dtype", dtype, tuple(IO)), ("gate", gate, ("log", "softplus", "safe")),
            ("g_dtype", g_dtype, (dtype, "float32")), ("beta_dtype", beta_dtype, (dtype, "float32")),
        ):  # fmt: skip
            if value not in accepted:
                raise ValueError(f"{name}: got {value}, accepted {' or '.join(map(str, accepted))}")
        if V <= 0 or V % 64:
            raise ValueError(f"V: got {V}, accepted a positive multiple of 64")
        self.K, self.V, self.io, self.pair = K, V, IO[dtype], {"bfloat16": "bf16", "float16": "f16"}[dtype]
        self.gate, self.l2norm, self.beta_sigmoid, self.dt_bias = gate, l2norm, beta_sigmoid, dt_bias
        self.g_words = 2 if g_dtype == "float32" else 1  # of a thread's two channels
        self.g_element, self.beta_element = ELEMENT[g_dtype], ELEMENT[beta_dtype]
        self.dyadic = not bounded or dtype == "float16"
        self.warps = K // 16  # a thread per channel pair and block
        self.threads = 32 * self.warps
        self.groups = self.warps // 4
        self.tiles = (K + V) // 64
        self.operand = max(2, K // 64) * TILE  # bytes of the q and the kD tile; later two score tiles each
        self.pitch = 4 * K + 32  # bytes of an L row: 8 rows x 4 lanes of 8 bytes without bank conflicts
        self.ctas = ctas

    # ---- host ------------------------------------------------------------------------------------------------------

    def _tiles(self, n: int, columns: int) -> cute.ComposedLayout:
        """(64 tokens, columns, n): `columns` and n in sequence of 64-wide tiles."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.io)
        return cute.tile_to_shape(atom, (CHUNK, columns, n), order=(0, 1, 2))

    def _columns(self) -> cute.ComposedLayout:
        """The same bytes as _tiles(self.tiles, 64) seen as (64 columns, 64 tokens, tile)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.io)
        return cute.tile_to_shape(atom, (64, CHUNK, self.tiles), order=(1, 0, 2))

    def _mma(self) -> cute.TiledMma:
        op = warpgroup.MmaF16BF16Op(
            self.io, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

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
            diagonal: small(4 * BLOCK * BLOCK)
            local: small(CHUNK * self.pitch // 4 if self.dyadic else 1)
            barriers: cute.struct.MemRange[Int64, 2]

        self.storage = SharedStorage
        self.kda_prep(
            tma_q, m_q, tma_k, m_k, tma_v, m_v, tma_w, m_w, tma_u, m_u, tma_a, m_a, g, beta, a_log, dt_bias, qg, kg, gl,
            scale, lower_bound,
        ).launch(
            grid=(g.shape[0] * gl.shape[1] * g.shape[2], 1, 1), block=(self.threads, 1, 1), stream=stream,
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
        scale: Float32,
        lower_bound: Float32,
    ):
        K = self.K
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        T, HV, NT = g.shape[1], g.shape[2], gl.shape[1]
        hv, chunk, b = bid % HV, (bid // HV) % NT, bid // (HV * NT)
        head = hv // (HV // cute.size(m_q, mode=[2]))
        valid = cutlass.min(T - chunk * CHUNK, CHUNK)

        smem = utils.SmemAllocator().allocate(self.storage)
        bar = smem.barriers.data_ptr()
        lay_q, lay_kv, lay_a = self._tiles(1, K), self._tiles(self.tiles, 64), self._tiles(1, CHUNK)
        s_q = smem.q.get_tensor(lay_q.outer, swizzle=lay_q.inner)
        s_kv = smem.kv.get_tensor(lay_kv.outer, swizzle=lay_kv.inner)
        s_k = smem.kv.get_tensor(lay_q.outer, swizzle=lay_q.inner)
        s_a = smem.kd.get_tensor(lay_a.outer, swizzle=lay_a.inner)
        columns = self._columns()
        s_b = smem.kv.get_tensor(columns.outer, swizzle=columns.inner)

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
                cute.arch.mbarrier_arrive_and_expect_tx(bar + 1, CHUNK * self.V * 2)
            cute.copy(load_q.atom, load_q.gmem[None, chunk], load_q.smem[None, 0], tma_bar_ptr=bar)
            cute.copy(load_k.atom, load_k.gmem[None, chunk], load_k.smem[None, 0], tma_bar_ptr=bar)
            for j in cutlass.range_constexpr(self.V // 64):
                cute.copy(load_v.atom, load_v.gmem[None, j], load_v.smem[None, K // 64 + j], tma_bar_ptr=bar + 1)

        half, blk = warp % (K // 64), warp // (K // 64)
        channel = half * 64 + 2 * lane
        x = SimpleNamespace(
            tid=tid, warp=warp, lane=lane, blk=blk, channel=channel, live=valid - BLOCK * blk, valid=valid,
            q=smem.q.data_ptr().toint(), kd=smem.kd.data_ptr().toint(), k=smem.kv.data_ptr().toint(),
            scales=smem.scales.data_ptr().toint(), totals=smem.totals.data_ptr().toint(),
            norms=smem.norms.data_ptr().toint(), beta=smem.beta.data_ptr().toint(),
            diagonal=smem.diagonal.data_ptr().toint(), local=smem.local.data_ptr().toint(), scale=scale,
            # 16-byte chunk 2 j + lane / 16 of row lane % 16, for j = 0..3: what ldmatrix.x4 reads as an A fragment
            swizzled=[(((lane >> 4) ^ (lane & 7)) << 4) ^ (j << 5) for j in range(4)],
            stride=Int64(HV * K),
        )  # fmt: skip
        token = Int64(b) * T + chunk * CHUNK
        element = ((token + BLOCK * blk) * HV + hv) * K + channel  # of this thread's first row in g, qg, kg
        x.element = element

        # -- A1 ------------------------------------------------------------------------------------------------------
        coefficients = self.gate_coefficients(x, a_log, dt_bias, hv, lower_bound)
        x.sums = self.cumulate(x, g.iterator.toint() + element * (2 * self.g_words), coefficients)
        ptx.sts_vec(x.totals + (blk * K + channel) * 4, x.sums[BLOCK - 1])
        if cutlass.const_expr(self.dyadic):
            for i in cutlass.range_constexpr(BLOCK):
                ptx.sts_vec(x.local + (BLOCK * blk + i) * self.pitch + channel * 4, x.sums[i])
        self.load_beta(x, beta, token, HV, hv)
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(bar, 0)
        if cutlass.const_expr(self.l2norm):
            self.row_norms(x)
            cute.arch.sync_threads()
        if cutlass.const_expr(self.dyadic):
            scores = self.diagonal_scores(x)
            cute.arch.sync_threads()

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
        mma = self._mma()
        thr = mma.get_slice(tid % 128)
        frag_b = mma.make_fragment_B(thr.partition_B(s_b))
        frag_a = self.load_inverse(x)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, 64)), Float32)
        for t in cutlass.range(group, self.tiles, self.groups, unroll=1):
            if t >= K // 64:
                cute.arch.mbarrier_wait(bar + 1, 0)
            self.product(mma, acc, frag_a, frag_b, t)
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            self.put_output(x, acc, t)
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

    # ---- A1: gate, cumsum, norms, beta -----------------------------------------------------------------------------

    def gate_coefficients(self, x, a_log, dt_bias, hv, lower_bound):
        """Per channel (slope, offset) of the exponent, and the factor of what the gate function returns."""
        if self.gate == "log":
            return None
        a = ptx.ex2(a_log[hv] * LOG2E)
        bias = [Float32(0.0)] * 2
        if self.dt_bias:
            bias = [dt_bias[hv * self.K + x.channel + j] for j in range(2)]
        if self.gate == "safe":
            slope = a * (-LOG2E)
            return slope, [slope * bias[j] for j in range(2)], lower_bound * LOG2E
        return Float32(LOG2E), [bias[j] * LOG2E for j in range(2)], -a

    def log2_decay(self, value: Float32, coefficients, j: int) -> Float32:
        """Log2 decay of one token and channel from the gate's value."""
        if self.gate == "log":
            out = value * LOG2E
        else:
            slope, offset, factor = coefficients
            y = ptx.fma(value, slope, offset[j])
            e = ptx.ex2(y)
            if self.gate == "safe":
                return factor * ptx.rcp(e + 1.0)
            # log2(1 + e): its series where 1 + e would lose digits, y itself where e would overflow
            series = LOG2E * e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
            out = factor * select_(e < 2.0**-7, series, select_(y > 24.0, y, ptx.lg2(e + 1.0)))
        if self.dyadic:
            out = select_(out < FLOOR, Float32(FLOOR), out)
        return out

    def cumulate(self, x, address, coefficients):
        """Inclusive cumsum over the block's 16 rows for both channels; rows past T count as no decay."""
        stride = x.stride * (2 * self.g_words)
        raw = []
        for i in range(BLOCK):
            raw.append(ptx.ldg_if(x.live, i, address, self.g_words))
            address = address + stride
        sums, total = [], [Float32(0.0)] * 2
        for i in range(BLOCK):
            values = [r.bitcast(Float32) for r in raw[i]] if self.g_words == 2 else ptx.unpack(raw[i][0], self.pair)
            step = [self.log2_decay(values[j], coefficients, j) for j in range(2)]
            total = [total[j] + select_(x.live > i, step[j], Float32(0.0)) for j in range(2)]
            sums.append(total)
        return sums

    @cute.jit
    def load_beta(self, x, beta: cute.Tensor, token: Int64, HV: Int32, hv: Int32):
        if x.tid < CHUNK:
            value = Float32(0.0)
            if x.tid < x.valid:
                flat = cute.make_tensor(beta.iterator + ((token + x.tid) * HV + hv), cute.make_layout(1))
                value = flat[0].to(Float32)
                if cutlass.const_expr(self.beta_sigmoid):
                    value = ptx.rcp(ptx.ex2(value * (-LOG2E)) + 1.0)
            ptx.sts(x.beta + x.tid * 4, value)

    def row_norms(self, x) -> None:
        """1 / norm of each row of q and k: diagonals of x x^T, whose B fragments are its A fragments."""
        lane = x.lane
        for n in range(8 // self.warps):
            block = x.warp & 3
            of_k = (x.warp >> 2) if self.warps == 8 else Int32(n)
            tile = x.q + of_k * (x.k - x.q) + (block * BLOCK + (lane & 15)) * ROW
            acc = [[Float32(0.0)] * 4 for _ in range(2)]
            for kk in range(self.K // 16):
                a = ptx.ldmatrix(tile + x.swizzled[kk % 4], (kk // 4) * TILE)
                for h in range(2):
                    acc[h] = ptx.mma(acc[h], a, (a[h], a[h + 2]), self.pair)
            odd = (lane >> 2) & 1
            mine = select_((lane & 3) == (lane >> 3), Int32(1), Int32(0))
            out = x.norms + of_k * (CHUNK * 4) + (block * BLOCK + (lane >> 2)) * 4
            for h in range(2):
                square = select_(odd == 1, acc[h][2 * h + 1], acc[h][2 * h])
                ptx.sts_if(mine, 0, out, ptx.rsqrt(square + 1e-6), 32 * h)

    def norm_of(self, x, of_k: int, row: Int32):
        """Four consecutive factors from `row` (a multiple of 4)."""
        return ptx.lds_vec(x.norms + row * 4, 4, of_k * CHUNK * 4, Float32)

    # ---- A2: decayed operands ----------------------------------------------------------------------------------------

    def operands(self, x, qg: cute.Tensor, kg: cute.Tensor) -> None:
        """qF over q, kF over k, kD (or kE) to its tile, qg and kg to global memory, the powers of two to `scales`."""
        pair, blk = self.pair, x.blk
        totals = [ptx.lds_vec(x.totals + x.channel * 4, 2, n * self.K * 4, Float32) for n in range(4)]
        before = [[Float32(0.0)] * 2]  # P_0 .. P_4
        for n in range(4):
            before.append([before[n][j] + totals[n][j] for j in range(2)])
        x.decay = before[4]
        anchors = [[Float32(0.0)] * 2] + [[ptx.ceil(p[j]) for j in range(2)] for p in before[1:]]
        mine, anchor, following = (
            [pick(blk, [v[j] for v in values]) for j in range(2)] for values in (before[:4], anchors[:4], anchors[1:])
        )
        power = self.store_scales(x, anchors, anchor)
        if self.dyadic:
            shift = [following[j] - mine[j] for j in range(2)]
            tail = [[ptx.ex2(x.decay[j] - following[j]) for j in range(2)]]
        else:
            shift = [anchor[j] - mine[j] for j in range(2)]
            tail = [[ptx.ex2(following[j] - anchor[j]) for j in range(2)], [ptx.ex2(x.decay[j] - following[j]) for j in range(2)]]
        rise = [mine[j] - anchor[j] for j in range(2)]

        base = x.q + (x.channel // 64) * TILE + blk * (BLOCK * ROW) + (x.lane & 3) * 4
        out_q, out_k = (t.iterator.toint() + x.element * 2 for t in (qg, kg))
        to_k, to_kd = x.k - x.q, x.kd - x.q
        for i4 in range(0, BLOCK, 4):
            if self.l2norm:
                norm_q, norm_k = (self.norm_of(x, side, blk * BLOCK + i4) for side in range(2))
            for i in range(i4, i4 + 4):
                total = x.sums[i]
                if self.dyadic:  # cheaper to load again than to hold through phase A1'
                    total = ptx.lds_vec(x.local + (BLOCK * blk + i) * self.pitch + x.channel * 4, 2, 0, Float32)
                here = base + ((x.lane >> 2) ^ (i & 7)) * 16
                q, k = ptx.unpack(ptx.lds(here, i * ROW), pair), ptx.unpack(ptx.lds(here + to_k, i * ROW), pair)
                if self.l2norm:
                    q, k = [v * norm_q[i - i4] for v in q], [v * norm_k[i - i4] for v in k]
                fall = [ptx.ex2(total[j] + rise[j]) for j in range(2)]
                grow = [ptx.ex2(shift[j] - total[j]) for j in range(2)]
                q_f = ptx.pack(q[0] * fall[0], q[1] * fall[1], pair)
                ptx.sts(here, q_f, i * ROW)
                ptx.sts(here + to_k, ptx.pack(k[0] * fall[0], k[1] * fall[1], pair), i * ROW)
                grown = [k[j] * grow[j] for j in range(2)]
                ptx.sts(here + to_kd, ptx.pack(grown[0], grown[1], pair), i * ROW)
                for factor in tail:
                    grown = [grown[j] * factor[j] for j in range(2)]
                ptx.stg_if(x.live, i, out_q, ptx.mul_pair(q_f, power, pair))
                ptx.stg_if(x.live, i, out_k, ptx.pack(grown[0], grown[1], pair))
                out_q, out_k = out_q + x.stride * 2, out_k + x.stride * 2

    def store_scales(self, x, anchors, anchor):
        """Rows 0-3 of `scales`: 2^N_b; row p of 4-9: what takes the keys of PAIRS[p] to the anchor of its queries. Each
        thread writes what its block number says, for its two channels; returns its own 2^N_b."""
        skip = 1 if self.dyadic else 0  # kE stands at the anchor of the block that follows
        at = x.scales + x.channel * 2
        power = ptx.pack(*(ptx.ex2_full(anchor[j]) for j in range(2)), self.pair)
        ptx.sts(at + x.blk * (self.K * 2), power)
        for first, n in ((4, 4), (8, 2)):
            steps = [[anchors[a][j] - anchors[b + skip][j] for j in range(2)] for a, b in PAIRS[first : first + n]]
            step = [pick(x.blk, [s[j] for s in steps]) for j in range(2)]
            value = ptx.pack(*(ptx.ex2_full(step[j]) for j in range(2)), self.pair)
            ptx.sts_if(n - x.blk, 0, at + (first + x.blk) * (self.K * 2), value)
        return power

    @cute.jit
    def store_decay(self, x, gl: cute.Tensor, element: Int64):
        flat = cute.make_tensor(gl.iterator + element, cute.make_layout(2))
        for j in cutlass.range_constexpr(2):
            flat[j] = x.decay[j]

    # ---- B: scores ---------------------------------------------------------------------------------------------------

    def blocks_of(self, p: Int32):
        """(query block, key block) of PAIRS[p]."""
        return tuple((Int32(code(side)) >> (2 * p)) & 3 for side in zip(*PAIRS))

    def pair_scores(self, x, p: Int32):
        """q and k scores of PAIRS[p], 2 column halves x 4 registers each."""
        a, b = self.blocks_of(p)
        lane = x.lane
        queries, keys = ((block * BLOCK + (lane & 15)) * ROW for block in (a, b))
        scale = x.scales + select_(p < 4, Int32(0), p) * (self.K * 2) + (lane & 3) * 4
        q, k = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for kk in range(self.K // 16):
            off, sw = (kk // 4) * TILE, x.swizzled[kk % 4]
            a_q, a_k = ptx.ldmatrix(x.q + queries + sw, off), ptx.ldmatrix(x.k + queries + sw, off)
            raw, to = ptx.ldmatrix(x.kd + keys + sw, off), [ptx.lds(scale, kk * 32 + 16 * r) for r in range(2)]
            key = [ptx.mul_pair(raw[r], to[r // 2], self.pair) for r in range(4)]
            for n in range(2):
                q[n] = ptx.mma(q[n], a_q, (key[n], key[n + 2]), self.pair)
                k[n] = ptx.mma(k[n], a_k, (key[n], key[n + 2]), self.pair)
        return q, k

    def strip(self, m: Int32, first: int):
        """A quarter of a pair: (pair, 1 for k scores, column half)."""
        return first + (m >> 2), (m >> 1) & 1, m & 1

    def strip_scores(self, x, m: Int32, first: int):
        """16 x 8 scores of one side of a pair: 4 registers."""
        p, of_k, half = self.strip(m, first)
        a, b = self.blocks_of(p)
        lane = x.lane
        queries = x.q + of_k * (x.k - x.q) + (a * BLOCK + (lane & 15)) * ROW
        keys = x.kd + (b * BLOCK + half * 8 + (lane & 7)) * ROW
        scale = x.scales + p * (self.K * 2) + (lane & 3) * 4
        out = [Float32(0.0)] * 4
        for kk in range(0, self.K // 16, 2):
            off = (kk // 4) * TILE
            raw = ptx.ldmatrix(keys + ((((lane >> 3) ^ (lane & 7)) << 4) ^ ((kk % 4) << 5)), off)
            for n in range(2):
                query = ptx.ldmatrix(queries + x.swizzled[(kk + n) % 4], off)
                key = [ptx.mul_pair(raw[2 * n + r], ptx.lds(scale, (kk + n) * 32 + 16 * r), self.pair) for r in range(2)]
                out = ptx.mma(out, query, key, self.pair)
        return out

    # Score tiles: Aqk and A^T over kD, the two halves of -L and D over q.

    def word(self, x, tile: Int32, row_block: Int32, half: int, chunk: Int32):
        """Address of the lane's word of an accumulator's row half in 16-byte chunk `chunk` of a score tile."""
        g = x.lane >> 2
        return tile + (row_block * BLOCK + 8 * half + g) * ROW + ((chunk ^ g) << 4) + (x.lane & 3) * 4

    @cute.jit
    def clear_upper(self, x):
        """Zeros in Aqk's six blocks above the diagonal, a warp each."""
        for n in cutlass.range_constexpr(-(-6 // self.warps)):
            block = x.warp + self.warps * n
            if block < 6:
                rows, columns = (Int32(code(s)) for s in ((0, 0, 0, 1, 1, 2), (1, 2, 3, 2, 3, 3)))
                row = ((rows >> (2 * block)) & 3) * BLOCK + (x.lane >> 1)
                chunk = ((columns >> (2 * block)) & 3) * 2 + (x.lane & 1)
                ptx.sts_vec(x.kd + row * ROW + ((chunk ^ (row & 7)) << 4), [Int32(0)] * 4)

    def put_q(self, x, acc, a, b, n) -> None:
        """Four registers of q scores at column half n (a number or a register) of block (a, b), masked, into Aqk."""
        for half in range(2):
            i, j = a * BLOCK + 8 * half + (x.lane >> 2), b * BLOCK + n * 8 + 2 * (x.lane & 3)
            value = [select_(j + r <= i, acc[2 * half + r] * x.scale, Float32(0.0)) for r in range(2)]
            ptx.sts(self.word(x, x.kd, a, half, 2 * b + n), ptx.pack(value[0], value[1], self.pair))

    def put_k(self, x, acc, a, b, n) -> None:
        """Likewise -beta times k scores of a block below the diagonal, split in two."""
        for half in range(2):
            beta = ptx.lds(x.beta + (a * BLOCK + 8 * half + (x.lane >> 2)) * 4, 0, Float32)
            high, low = ptx.split(*(-(acc[2 * half + r] * beta) for r in range(2)))
            at = self.word(x, x.q, a, half, 2 * b + n)
            ptx.sts(at, high)
            ptx.sts(at, low, TILE)

    def put_k_diagonal(self, x, acc, a, n, keep=None) -> None:
        """Likewise beta times k scores of a diagonal block, strictly lower, in fp32. keep(i, j): which words to write."""
        for half in range(2):
            i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
            beta = ptx.lds(x.beta + (a * BLOCK + i) * 4, 0, Float32)
            value = [select_(j + r < i, acc[2 * half + r] * beta, Float32(0.0)) for r in range(2)]
            at = x.diagonal + ((a * BLOCK + i) * BLOCK + j) * 4
            for r in range(2):
                if keep is None:
                    ptx.sts(at, value[r], 4 * r)
                else:
                    ptx.sts_if(keep(i, j), 0, at, value[r], 4 * r)

    @cute.jit
    def put_pair(self, x, scores, p: Int32):
        a, b = self.blocks_of(p)
        for n in cutlass.range_constexpr(2):
            self.put_q(x, scores[0][n], a, b, n)
        if p < 4:
            for n in cutlass.range_constexpr(2):
                self.put_k_diagonal(x, scores[1][n], a, n)
        else:
            for n in cutlass.range_constexpr(2):
                self.put_k(x, scores[1][n], a, b, n)

    @cute.jit
    def put_strip(self, x, acc, m: Int32, first: cutlass.Constexpr):
        p, of_k, half = self.strip(m, first)
        a, b = self.blocks_of(p)
        if of_k == 1:
            self.put_k(x, acc, a, b, half)
        else:
            self.put_q(x, acc, a, b, half)

    # ---- D, E: inverse -----------------------------------------------------------------------------------------------

    def invert_diagonal(self, x) -> None:
        """X = (I + L_bb)^-1, a column a lane (the two halves of a warp do the same), by forward substitution: row i is
        e_i - sum_j L_ij X_j. Leaves X split in two, and diag(beta) X^T in A^T."""
        column, upper = x.lane & 15, x.lane >> 4
        rows = x.diagonal + x.warp * (BLOCK * BLOCK * 4)
        X = [select_(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
        for j4 in range(0, BLOCK, 4):
            for i in range(j4 + 1, BLOCK):
                factors = ptx.lds_vec(rows, 4, (i * BLOCK + j4) * 4, Float32)
                for j in range(j4, min(i, j4 + 4)):
                    X[i] = ptx.fma(-factors[j - j4], X[j], X[i])
        chunk = 2 * x.warp + (column >> 3)
        half = upper * TILE + x.warp * (BLOCK * ROW) + (column & 7) * 2  # lower lanes write the high parts
        parts = [ptx.split(X[i], X[i + 1]) for i in range(0, BLOCK, 2)]
        for i in range(BLOCK):
            word = select_(upper == 1, parts[i // 2][1], parts[i // 2][0])
            ptx.sts_half(x.q + half + ((chunk ^ (i & 7)) << 4), (word >> 16) if i % 2 else word, i * ROW)
        beta = ptx.lds(x.beta + (x.warp * BLOCK + column) * 4, 0, Float32)
        words = [ptx.pack(X[i] * beta, X[i + 1] * beta, self.pair) for i in range(0, BLOCK, 2)]
        words = [select_(upper == 1, words[4 + i], words[i]) for i in range(4)]
        at = x.kd + TILE + (x.warp * BLOCK + column) * ROW + (((2 * x.warp + upper) ^ (column & 7)) << 4)
        ptx.sts_vec(at, words)

    def scale_keys(self, x, t: Int32) -> None:
        """kF 2^N_b over kF in blocks 1 to 3, by 128 threads (t)."""
        row, place = t >> 3, t & 7
        channel = (place ^ (row & 7)) * 8
        for tile in range(self.K // 64):
            for blk in range(1, 4):
                at, off = x.k + row * ROW + place * 16, tile * TILE + blk * BLOCK * ROW
                scale = ptx.lds_vec(x.scales + channel * 2, 4, (blk * self.K + tile * 64) * 2)
                words = ptx.lds_vec(at, 4, off)
                ptx.sts_vec(at, [ptx.mul_pair(words[i], scale[i], self.pair) for i in range(4)], off)

    def invert_column(self, x, b: int) -> None:
        """Blocks below the diagonal of block column b: X_a = D_a sum_c (-L_ac) X_c, kept transposed in registers, where
        the accumulator of one product is the A operand of the next."""
        lane = x.lane
        low = (lane & 7) + ((lane >> 4) & 1) * 8
        start = x.q + (b * BLOCK + low) * ROW + (((2 * b + ((lane >> 3) & 1)) ^ (lane & 7)) << 4)
        X = [ptx.ldmatrix(start, part * TILE, trans=True) for part in range(2)]
        sums = {a: [[Float32(0.0)] * 4 for _ in range(2)] for a in range(b + 1, 4)}
        for c in range(b, 3):
            for a in range(c + 1, 4):
                sums[a] = self.times(x, sums[a], X, a, c)
            a = c + 1
            zero = [[Float32(0.0)] * 4 for _ in range(2)]
            out = self.times(x, zero, self.narrow(sums[a]), a, a)
            if a < 3:
                X = self.narrow(out)
            for half in range(2):
                beta = ptx.lds(x.beta + (b * BLOCK + 8 * half + (lane >> 2)) * 4, 0, Float32)
                for n in range(2):
                    value = [out[n][2 * half + r] * beta for r in range(2)]
                    at = self.word(x, x.kd + TILE, Int32(b), half, Int32(2 * a + n))
                    ptx.sts(at, ptx.pack(value[0], value[1], self.pair))

    def narrow(self, acc):
        """An accumulator of 16 x 16 as the two parts of an A operand."""
        parts = [ptx.split(acc[n][2 * half], acc[n][2 * half + 1]) for n in range(2) for half in range(2)]
        return [p[0] for p in parts], [p[1] for p in parts]

    def times(self, x, acc, left, a: int, c: int):
        """acc + left times the transpose of block (a, c) of the tiles over q, both in two parts."""
        at = x.q + (a * BLOCK + (x.lane & 15)) * ROW + (((2 * c + (x.lane >> 4)) ^ (x.lane & 7)) << 4)
        right = [ptx.ldmatrix(at, part * TILE) for part in range(2)]
        acc = list(acc)
        for l, r in ((0, 1), (1, 0), (0, 0)):
            for n in range(2):
                acc[n] = ptx.mma(acc[n], left[l], (right[r][n], right[r][n + 2]), "bf16")
        return acc

    # ---- F: w and u --------------------------------------------------------------------------------------------------

    def load_inverse(self, x) -> cute.Tensor:
        """A diag(beta) as A fragments of four k steps: the warp's 16 rows, zero right of the diagonal block."""
        lane, block = x.lane, x.warp & 3
        a = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8)), self.io)
        words = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(32)), Int32)
        at = x.kd + TILE + ((lane & 7) + ((lane >> 4) & 1) * 8) * ROW + (((2 * block + ((lane >> 3) & 1)) ^ (lane & 7)) << 4)
        for kk in range(4):
            regs = ptx.ldmatrix(at, kk * BLOCK * ROW, trans=True)
            for r in range(4):
                words[4 * kk + r] = select_(block >= kk, regs[r], Int32(0))
        return a

    def product(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, tile: Int32) -> None:
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(4):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k, tile], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    def put_output(self, x, acc: cute.Tensor, tile: Int32) -> None:
        at = x.k + tile * TILE + ((x.warp & 3) * BLOCK + (x.lane & 15)) * ROW
        for n in range(0, 8, 2):
            words = [ptx.pack(acc[4 * n + 2 * i], acc[4 * n + 2 * i + 1], self.pair) for i in range(4)]
            ptx.stmatrix(at + x.swizzled[n // 2], words)


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
    ctas: int = 3,
):
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_90a") with TVM-FFI.

    gate: "log", "softplus" or "safe"; bounded: natural-log decays lie in [-5, 0] (implied by "safe", the caller's
    promise with "log"). dt_bias: whether there is one. ctas: per SM, which caps the registers. Arguments of the compiled
    function: those of KdaPrep.__call__, contiguous; B, T, H, HV are free.
    ValueError: a parameter outside its domain.
    """
    if arch != "sm_90a":
        raise ValueError(f"arch: got {arch}, accepted sm_90a")
    fn = KdaPrep(K, V, dtype, gate, bounded, l2norm, beta_sigmoid, g_dtype, beta_dtype, dt_bias, ctas)
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
        Float32(1.0), Float32(-5.0), make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip
    return fn, args
