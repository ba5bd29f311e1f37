"""The whole KDA forward in one kernel: what the variants for Hopper (kda_sm90.py) and Blackwell (kda_sm100.py) share,
which is everything but SCAN. Raw q, k, v, gate and beta in, o and the final state out.

One CTA walks all chunks of C = 64 tokens of one (batch, value head, V tile of 64 or 128). PREP prepares chunk c + 1 in
shared memory while SCAN applies chunk c to the state, which stays in SCAN's registers. On SMs that would stand idle a
helper's PREP prepares chunks for all rows, and SHIP, in SCAN's place, sends them through L2 (helpers.py).
The preparation's algebra is that of rung 005, decays in log2 units, rows in four blocks of 16:

    l       log decay of a row and channel, 0 for rows past T;  L = its inclusive cumsum inside the block
    P_b     cumsum of the blocks before b (P_4: whole chunk);    G = P_b + L;   N_b = ceil(P_b), the anchor of block b
    qF      q 2^(G - N_b)            kF  k 2^(G - N_b)           at most 1, rounded to io once
    kD      k 2^(N_b - G)            bounded gates: at most 2^117, so bf16 only
    kE      k 2^(N_b+1 - G)          other gates and fp16: at most 2
    Aqk     qF_i . kD_j 2^(N_a - N_b)                i in block a, j in block b <= a, j < i; q_i . k_i for j = i
    L_ij    beta_i (kF_i . kD_j 2^(N_a - N_b))       j < i;      A = (I + L)^-1
    qG, kG  qF 2^N_b, kF 2^N_b (exact);   kg = k 2^(P_4 - G);   decay = 2^P_4

An anchor is a cumsum over rows before the block, a whole number: moving a rounded operand between anchors is exact, and
no output of a row depends on a later row, bitwise. Without a bound on the gate the diagonal blocks go dyadically
(dyadic.py). w and u need not exist (ALGORITHM.md (7)); beta meets r in fp32, so that it is not rounded by itself:

    R    r   = v - kG h                 A    v'  = A beta r
    DH   h   = 2^P_4 h + kg^T v'        O    o   = scale (qG h + Aqk v')

h_0 is `h0` or zero; after the last chunk h is written to `ht`. Tokens past T are zeros by TMA, beta 0 and decay 1.

    PREP, chunk c    who                          reads                       leaves
    A1 row products  back: warp = block           raw q, k                    norms, q_i . k_i
       gate, cumsum  thread = 2 channels x block  gate                        L (registers), block totals; beta
    (A1' diagonal)   warp = block x levels        raw q, k; L over kD and kg  Aqk and L of the diagonal blocks
    A2 operands      thread = 2 channels x block  raw q, k                    qF, kF, kD, kg, scales, decay
       (TMA)         last warp                                                raw q, k of chunk c + 1
    B  scores        warp = block pair            qF, kF, kD                  Aqk; -L as two bf16 over kD; L fp32
       (TMA)         last warp                                                gate of chunk c + 1, over its kg (and kF),
                                                                              or over kD after a helper's chunk
    D  diagonal      front: lane = column         L fp32                      D split; diagonal blocks of -A
       times 2^N_b   back                         qF, kF                      qG, kG in their place
    E  off-diagonal  front: warp = block column   -L, D                       -A
PREP has K / 16 warps. Front are the first four of them, back the last four; with K = 64 they are the same. The back
goes on to A1 of the next chunk while the front inverts. MMA: mma.sync m16n8k16.

    operand of SCAN   smem view        major     bytes         used as
    kG, qG            (64 token, K)    K         [token, K]    B of R, O: contraction over K
    -A, Aqk           (64 i, 64 j)     K         [i, j]        B of A, O: N = token i, contraction over j
    kg                (K, 64 token)    MN        [token, K]    B of DH: N = k, contraction over token
    v, o              (64 v, 64 token) V contig. [token, v]    ldmatrix.trans / stmatrix.trans; o over v
Tiles are [64 rows][64 columns] of io, 128-byte rows, 16-byte chunk c of row r at chunk c ^ (r % 8) (TMA's 128-byte
swizzle), wider ones a sequence of such. Two slots of each, a ring. Blocks of -A and Aqk above the diagonal are zeroed
once, at the start.

    mbarrier  ring  count                         arrives                               waits
    raw       1     1 + bytes                     PREP's last warp (q, k)               PREP before A1
    gate      1     1 + bytes                     PREP's last warp                      PREP before the cumsum
    ready     2     threads of PREP (+ bytes)     PREP, every lane, after its last phase SCAN (SHIP)
                                                  (a helper's chunk: when it is due; its bytes)
    free      2     threads of SCAN; of SHIP 1    SCAN, every lane, after its last read PREP before it (or a copy) writes
    value     2 x 64 columns of V, 1 + bytes      SCAN (v)                              SCAN
    bar.sync  0: all, once; 1: PREP between phases; 2: its front between D and E; from 3 on: SCAN's
Both kernels are this one: rows with helpers (helpers.py) and even shares (shares.py) differ in which chunks a CTA prepares
and walks (`plan_of`, `jobs`, `next_job`, `place_of`, `run_scan`) and in whether it works at all (`wanted`).
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from . import ptx
from .prep import Prep
from .tiles import APART, BLOCK, CHUNK, INFINITE, PAIRS, SLOTS, TILE, WALK, WG_V

IO = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT = {**IO, "float32": Float32}
PREP_REGISTERS = 88  # of the 65,536 that 512 threads share; fewer threads need no setmaxnreg


def fake(element, *shape):
    """A contiguous tensor to compile with."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16)


class Forward(Prep):
    """The jit function of one static configuration, but for what differs between architectures: SCAN.

    A subclass says how many threads SCAN has (`scan_threads`) and how many 8-byte words of shared memory of its own,
    mbarriers for example, starts those, and runs SCAN's warps, which are SHIP's in a helper (`run_scan`).
    """

    own_words = 0

    def start(self, bars, warp: Int32, helps) -> None:
        """Initialise what SCAN alone uses: nothing in a helper (`helps`)."""

    def __init__(
        self,
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
        has_h0: bool = True,
        v_tile: int = 64,
    ):
        """gate: "log", "softplus" or "safe"; bounded: natural-log decays lie in [-5, 0] (implied by "safe", the
        caller's promise with "log"). dt_bias, has_h0: whether there is one. v_tile: V columns a CTA walks; each CTA
        prepares its chunks itself, so 64 doubles that work, but leaves PREP more of an SM.
        ValueError: a parameter outside its domain.
        """
        for name, value, accepted in (
            ("K", K, (64, 128)), ("dtype", dtype, tuple(IO)), ("gate", gate, ("log", "softplus", "safe")),
            ("g_dtype", g_dtype, (dtype, "float32")), ("beta_dtype", beta_dtype, (dtype, "float32")),
            ("v_tile", v_tile, (64, 128)),
        ):  # fmt: skip
            if value not in accepted:
                raise ValueError(f"{name}: got {value}, accepted {' or '.join(map(str, accepted))}")
        if V <= 0 or V % v_tile:
            raise ValueError(f"V: got {V}, accepted a positive multiple of v_tile = {v_tile}")
        self.K, self.V, self.io, self.pair = K, V, IO[dtype], {"bfloat16": "bf16", "float16": "f16"}[dtype]
        self.gate, self.l2norm, self.beta_sigmoid, self.dt_bias = gate, l2norm, beta_sigmoid, dt_bias
        self.has_h0 = has_h0
        self.g_words = 2 if g_dtype == "float32" else 1  # of a thread's two channels
        self.beta_wide = beta_dtype == "float32"
        self.g_columns = 64 // self.g_words  # of a box: 128 bytes
        self.g_element, self.beta_element = ELEMENT[g_dtype], ELEMENT[beta_dtype]
        self.dyadic = not bounded or dtype == "float16"
        self.v_tile = v_tile
        self.groups = self.v_tile // WG_V
        self.warps = K // 16  # of PREP: a thread per channel pair and block
        self.threads_scan, self.threads_prep = self.scan_threads(), 32 * self.warps
        self.threads = self.threads_scan + self.threads_prep
        self.keys = K // 64 * TILE  # bytes of a tile [64, K]
        self.words = 2 + (2 + self.groups) * SLOTS  # of barriers, shared by both architectures
        # What a helper ships of a chunk: (name in shared memory, bytes), one after the other.
        self.cargo = (("qg", self.keys), ("kf", self.keys), ("kg", self.keys), ("inverse", TILE), ("aqk", TILE),
                      ("decay", K * 4), ("beta", CHUNK * 4))  # fmt: skip
        self.shipment = sum(size for _, size in self.cargo)

    # ---- layouts ---------------------------------------------------------------------------------------------------

    def _smem(self, rows: int, cols: int, stages: int, row_contiguous: bool) -> cute.ComposedLayout:
        """128-byte swizzled (rows, cols, stages); `row_contiguous`: neighbours along a column are adjacent."""
        kind = warpgroup.SmemLayoutAtomKind.MN_SW128 if row_contiguous else warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.io)
        order = (1, 0, 2) if row_contiguous else (0, 1, 2)
        return cute.tile_to_shape(atom, (rows, cols, stages), order=order)

    def _layouts(self) -> SimpleNamespace:
        keys = self._smem(CHUNK, self.K, SLOTS, False)
        return SimpleNamespace(
            raw=self._smem(CHUNK, self.K, 1, False),
            qg=keys,
            kf=keys,
            kg=self._smem(self.K, CHUNK, SLOTS, True),
            inverse=self._smem(CHUNK, CHUNK, SLOTS, False),
            aqk=self._smem(CHUNK, CHUNK, SLOTS, False),
            v=self._smem(self.v_tile, CHUNK, SLOTS, True),
            decay=cute.make_layout((self.K, SLOTS)),
            beta=cute.make_layout((CHUNK, SLOTS)),
        )

    # ---- host ------------------------------------------------------------------------------------------------------

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
        h0: cute.Tensor | None,  # [B, HV, K, V] fp32, or None without has_h0
        o: cute.Tensor,  # [B, T, HV, V] io, written
        ht: cute.Tensor,  # [B, HV, K, V] fp32, written
        shipped: cute.Tensor,  # [chunks that helpers prepare, shipment] uint8, scratch; of any length without helpers
        told: cute.Tensor,  # int32: [shares] walks, dropped, least (cuts.py, shares.py); zeros for what is shipped, set to 1
        shares: Int32,  # even ones; 0: rung 010's kernel alone
        helpers: Int32,  # CTAs
        own: Int32,  # after `lead` chunks a row prepares this many, and the helpers
        run: Int32,  # the following, and so on (helpers.py)
        lead: Int32,
        scale: Float32,
        lower_bound: Float32,  # ln units, gate "safe"
        stream,
    ):
        K, io = self.K, self.io
        lay = self._layouts()

        def one(layout):
            return cute.slice_(layout, (None, None, 0))

        def rows(x):  # [B, T, heads, D] seen as (T, D, heads, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))

        def columns(x):  # [B, T, heads, D] seen as (D, T, heads, B)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 1, 2, 0]))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        values = one(self._smem(WG_V, CHUNK, 1, True))
        tma_q, m_q = cpasync.make_tiled_tma_atom(load, rows(q), one(lay.raw), (CHUNK, K))
        tma_k, m_k = cpasync.make_tiled_tma_atom(load, rows(k), one(lay.raw), (CHUNK, K))
        tma_v, m_v = cpasync.make_tiled_tma_atom(load, columns(v), values, (WG_V, CHUNK))
        tma_o, m_o = cpasync.make_tiled_tma_atom(store, columns(o), values, (WG_V, CHUNK))
        box = cute.make_layout((CHUNK, self.g_columns), stride=(self.g_columns, 1))
        tma_g, m_g = cpasync.make_tiled_tma_atom(load, rows(g), box, (CHUNK, self.g_columns))

        def tile(bytes):
            return cute.struct.Align[cute.struct.MemRange[io, bytes // 2], 1024]

        def small(n):
            return cute.struct.Align[cute.struct.MemRange[Float32, n], 128]

        @cute.struct
        class SharedStorage:
            raw: tile(2 * self.keys)  # q, k as loaded
            kd: tile(max(2 * TILE, self.keys))  # kD or kE; then the two halves of -L and D
            qg: tile(SLOTS * self.keys)  # qF, then qG; this and the five that follow are SCAN's operands
            kf: tile(SLOTS * self.keys)  # kF, then kG
            kg: tile(SLOTS * self.keys)
            inverse: tile(SLOTS * TILE)  # -A
            aqk: tile(SLOTS * TILE)
            v: tile(SLOTS * self.groups * TILE)
            decay: small(SLOTS * K)
            scales: small(len(PAIRS) * K // 2)
            totals: small(4 * K)
            norms: small(2 * CHUNK)
            beta: small(2 * CHUNK)
            dots: small(CHUNK)
            diagonal: small(4 * BLOCK * BLOCK)
            peaks: small(32)
            barriers: cute.struct.MemRange[Int64, self.words + self.own_words]

        self.storage = SharedStorage
        B, T, HV = g.shape[0], g.shape[1], g.shape[2]
        self.kda_forward(
            tma_q, m_q, tma_k, m_k, tma_v, m_v, tma_o, m_o, tma_g, m_g, g, beta, a_log, dt_bias, h0, ht, shipped,
            told, shares, helpers, own, run, lead, T, B, HV, HV // q.shape[2], scale, lower_bound,
        ).launch(
            grid=(self.ctas(shares, helpers, B * HV * (self.V // self.v_tile)), 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    # ---- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kda_forward(
        self,
        tma_q: cute.CopyAtom,
        m_q: cute.Tensor,
        tma_k: cute.CopyAtom,
        m_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        m_v: cute.Tensor,
        tma_o: cute.CopyAtom,
        m_o: cute.Tensor,
        tma_g: cute.CopyAtom,
        m_g: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        h0: cute.Tensor | None,
        ht: cute.Tensor,
        shipped: cute.Tensor,
        told: cute.Tensor,
        shares: Int32,
        helpers: Int32,
        own: Int32,
        run: Int32,
        lead: Int32,
        T: Int32,
        B: Int32,
        HV: Int32,
        heads: Int32,  # value heads a q/k head
        scale: Float32,
        lower_bound: Float32,
    ):
        smem = SmemAllocator().allocate(self.storage)
        words, lay = ("walks", "dropped", "least"), cute.make_layout(shares)
        said = SimpleNamespace(**{name: cute.make_tensor(told.iterator + i * shares, lay) for i, name in enumerate(words)})
        if self.wanted(said):
            bid, _, _ = cute.arch.block_idx()
            size = SimpleNamespace(
                B=B, HV=HV, T=T, heads=heads, chunks=cute.ceil_div(T, CHUNK), n_v=self.V // self.v_tile, shares=shares,
                shipped=shipped.iterator.toint(), arrived=told.iterator.toint() + Int64(shares) * (4 * len(words)),
            )  # fmt: skip
            plan = self.plan_of(bid, (helpers, own, run, lead), size, said.walks)
            state = SimpleNamespace(h0=h0, ht=ht, told=said, scale=scale)
            loads = SimpleNamespace(q=(tma_q, m_q), k=(tma_k, m_k), v=(tma_v, m_v), o=(tma_o, m_o), g=(tma_g, m_g))
            self.work(smem, plan, state, loads, g.iterator.toint(), beta, a_log, dt_bias, lower_bound)

    @cute.jit
    def work(self, smem, plan, state, loads, gates_at: Int64, beta, a_log, dt_bias, lower_bound: Float32):
        """A CTA's. plan: plan_of; state: what SCAN has besides; loads: (TMA atom, tensor) by name."""
        K = self.K
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tid, _, _ = cute.arch.thread_idx()
        lay = self._layouts()
        shared = {}
        for name in ("qg", "kf", "kg", "inverse", "aqk", "v"):
            layout = getattr(lay, name)
            shared[name] = getattr(smem, name).get_tensor(layout.outer, swizzle=layout.inner)
        s_v = shared.pop("v")
        raw = smem.raw.data_ptr()
        q_raw, k_raw = (
            cute.make_tensor(cute.recast_ptr(raw + i * (self.keys // 2), lay.raw.inner, dtype=self.io), lay.raw.outer)
            for i in range(2)
        )
        address = {
            name: getattr(smem, name).data_ptr().toint() for name in
            ("raw", "kd", "qg", "kf", "kg", "inverse", "aqk", "decay", "scales", "totals", "norms", "beta", "dots", "diagonal",
             "peaks")
        }  # fmt: skip
        boxes = cute.make_layout(
            (CHUNK, self.g_columns, K // 64, SLOTS),
            stride=(self.g_columns, 1, CHUNK * self.g_columns, K // 64 * CHUNK * self.g_columns),
        )
        early = cute.make_tensor(  # over kD: where a gate goes while the tiles of its slot are in use
            cute.recast_ptr(smem.kd.data_ptr(), dtype=self.g_element),
            cute.make_layout(boxes.shape[:3], stride=boxes.stride[:3]),
        )
        gates = [
            cute.make_tensor(cute.recast_ptr(getattr(smem, name).data_ptr(), dtype=self.g_element), boxes)
            for name in ("kg", "kf")[: self.g_words]
        ]
        small = {name: getattr(smem, name).get_tensor(getattr(lay, name)) for name in ("decay", "beta")}
        operands = SimpleNamespace(**shared, **small)
        base = smem.barriers.data_ptr()
        bars = SimpleNamespace(
            raw=base, gate=base + 1, ready=base + 2, free=base + 2 + SLOTS, value=base + 2 + 2 * SLOTS, own=base + self.words,
        )  # fmt: skip
        self.init_barriers(bars, warp, plan.helps)
        self.start(bars, warp, plan.helps)
        self.clear_upper(tid, smem.inverse.data_ptr().toint())
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        if warp < self.threads_scan // 32:
            # Copies: a loop in this branch rebinds what it can reach, and the other branch reads it too.
            at = SimpleNamespace(**vars(state), plan=SimpleNamespace(**vars(plan)), address=dict(address))
            self.run_scan(operands, s_v, loads.v, loads.o, SimpleNamespace(**vars(bars)), at, warp)
        else:
            self.set_registers(PREP_REGISTERS)
            tma = SimpleNamespace(q=(*loads.q, q_raw), k=(*loads.k, k_raw), g=loads.g, gates=gates, early=early)
            self.prepare(address, tma, bars, plan, tid - self.threads_scan, beta, a_log, dt_bias, gates_at, lower_bound)

    @cute.jit
    def count_open(self, walks: cute.Tensor) -> Int32:
        """How many lanes see an open cut: 0 only if there is none. The same in all lanes."""
        found = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), cute.size(walks), 32, unroll=1):
            found = select_(walks[i] > WALK, Int32(1), found)
        return self.count(found)

    @cute.jit
    def count_seen(self, dropped: cute.Tensor, least: cute.Tensor) -> Int32:
        """How many lanes see a dropped state that is not small beside what followed. The same in all lanes."""
        found = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), cute.size(dropped) - 1, 32, unroll=1):
            seen = (dropped[i] >= INFINITE) | (dropped[i] > least[i + 1] + APART)
            found = select_(seen, Int32(1), found)
        return self.count(found)

    def count(self, found: Int32) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.popc(cute.arch.vote_ballot_sync(found == 1)))

    @cute.jit
    def init_barriers(self, bars, warp: Int32, helps):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars.raw, 1)
                cute.arch.mbarrier_init(bars.gate, 1)
                for s in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(bars.ready + s, self.threads_prep)
                    cute.arch.mbarrier_init(bars.free + s, select_(helps, Int32(1), Int32(self.threads_scan)))
                    for i in cutlass.range_constexpr(self.groups):
                        cute.arch.mbarrier_init(bars.value + i * SLOTS + s, 1)
            cute.arch.mbarrier_init_fence()

    def clear_upper(self, tid: Int32, inverse: Int32) -> None:
        """Zeros in all of -A and Aqk, which lie side by side."""
        for i in range(0, 2 * SLOTS * TILE, 16 * self.threads):
            ptx.sts_vec(inverse + tid * 16, [Int32(0)] * 4, i)

    def set_registers(self, n: int) -> None:
        """Registers of a thread from here on, 128 so far."""
        if self.threads == 512:
            (cute.arch.setmaxregister_increase if n > 128 else cute.arch.setmaxregister_decrease)(n)

    def tma(self, atom, tensor, smem_tile, shape, coord) -> SimpleNamespace:
        """A copy's atom, and its tiles in shared and global memory."""
        tile = cute.local_tile(tensor, shape, coord)
        s, t = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem_tile, 0, 2), cute.group_modes(tile, 0, 2)
        )
        return SimpleNamespace(atom=atom, smem=s, gmem=t)

    @cute.jit
    def advance(self, slot: Int32, phase: Int32):
        """The next (slot, phase) of the ring."""
        slot += 1
        if slot == SLOTS:
            slot = Int32(0)
            phase ^= 1
        return slot, phase

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def fake_arguments(self) -> tuple:
        """What to compile __call__ with, for TVM-FFI: contiguous; B, T, H, HV are free."""
        B, T, H, HV, flat, tasks, words = (cute.sym_int() for _ in range(7))
        K, V = self.K, self.V
        values, state = fake(self.io, B, T, HV, V), fake(Float32, B, HV, K, V)
        raw = self.gate != "log"
        return (
            fake(self.io, B, T, H, K), fake(self.io, B, T, H, K), values, fake(self.g_element, B, T, HV, K),
            make_fake_compact_tensor(self.beta_element, (B, T, HV), stride_order=(2, 1, 0)),
            fake(Float32, HV) if raw else None, fake(Float32, flat) if raw and self.dt_bias else None,
            state if self.has_h0 else None, values, state,
            fake(cutlass.Uint8, tasks, self.shipment), fake(Int32, words), Int32(0), Int32(0), Int32(1), Int32(1), Int32(0),
            Float32(1.0), Float32(-5.0), make_fake_stream(use_tvm_ffi_env_stream=True),
        )  # fmt: skip


Forward.kda_forward.set_name_prefix("kda_forward", remove_cutlass_symbol=True, keep_mangled_name=False)
