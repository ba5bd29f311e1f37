"""How far before each cut a share must walk: the kernel in front of the one of even shares (shares.py).

A token acts on the state as (I - beta k k^T) diag(2^l) (ALGORITHM.md, 19): its norm is at most 2^max_c(l_c) times
max(1, |beta |k|^2 - 1|), and the second factor is 1 for normalised k and beta in [0, 2]. A chunk's fade is the sum of both
logarithms over its tokens (rung 007). walks[i]: the least number of chunks before share i's first whose fades sum to -40
or less; fewer where the strip begins before that; WALK + 1 where not even WALK chunks are enough. A NaN closes nothing.
It also zeroes the words by which helpers say that a chunk has arrived.

One CTA a cut: warp = 8 tokens of one chunk, lane = K / 32 channels.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from . import ptx
from .forward import ELEMENT, IO, fake
from .operands import LOG2E, Operands
from .shares import begin
from .tiles import CHUNK, WALK

CLOSED = -40.0  # log2: what a state comes down by before it may be dropped
PARTS = 8  # warps of a chunk
TOKENS = CHUNK // PARTS  # of a warp
THREADS = 32 * PARTS * WALK


class KdaCuts(Operands):
    """The jit function of one static configuration."""

    def __init__(self, K: int, V: int, dtype: str, gate: str, l2norm: bool, beta_sigmoid: bool, g_dtype: str, beta_dtype: str,
                 dt_bias: bool, v_tile: int):  # fmt: skip
        """As those of Forward; gate "log" or "safe". ValueError: a parameter outside its domain."""
        if gate not in ("log", "safe"):
            raise ValueError(f"gate: got {gate}, accepted log or safe")
        self.K, self.n_v, self.io, self.gate, self.dt_bias = K, V // v_tile, IO[dtype], gate, dt_bias
        self.l2norm, self.beta_sigmoid, self.grows = l2norm, beta_sigmoid, not (l2norm and beta_sigmoid)
        self.g_element, self.beta_element, self.beta_wide = ELEMENT[g_dtype], ELEMENT[beta_dtype], beta_dtype == "float32"
        self.pair = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        self.channels = K // 32  # of a lane

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # [B, T, H, K] io
        g: cute.Tensor,  # [B, T, HV, K]: ln decay (gate "log") or raw
        beta: cute.Tensor,  # [B, T, HV], or its logits
        a_log: cute.Tensor | None,  # [HV] fp32, None for gate "log"
        dt_bias: cute.Tensor | None,  # [HV * K] fp32 or None
        told: cute.Tensor,  # int32 (Forward.__call__): walks written, the words after `least` zeroed
        shares: Int32,
        lower_bound: Float32,  # ln units, gate "safe"
        stream,
    ):
        self.kda_forward_cuts(k, g, beta, a_log, dt_bias, told, shares, lower_bound).launch(
            grid=(shares, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kda_forward_cuts(
        self,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        told: cute.Tensor,
        shares: Int32,
        lower_bound: Float32,
    ):
        B, T, HV, H = g.shape[0], g.shape[1], g.shape[2], k.shape[2]
        chunks, warp, lane = cute.ceil_div(T, CHUNK), cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        first = begin(B * HV * self.n_v * chunks, shares, bid)
        row, c = first // chunks // self.n_v, first % chunks
        b, hv = row // HV, row % HV
        x = SimpleNamespace(
            k=k.iterator.toint(), g=g.iterator.toint(), beta=beta, lane=lane, channel=lane * self.channels, HV=HV, H=H,
            hv=hv, key_head=hv // (HV // H), lower_bound=lower_bound, a_log=a_log, dt_bias=dt_bias,
        )  # fmt: skip
        back, part = warp // PARTS, warp % PARTS
        token, exists = Int64(b) * T + ((c - 1 - back) * CHUNK + part * TOKENS), c - back
        gates = self.load_gates(x, token, exists)  # first: all else waits for them
        coefficients = cute.make_rmem_tensor(1 + self.channels, Float32)
        self.load_coefficients(x, hv, coefficients)
        x.coefficients = self.gate_coefficients(x, coefficients)

        fades = cute.make_tensor(SmemAllocator().allocate_array(Float32, WALK * PARTS), cute.make_layout((PARTS, WALK)))
        fade = Float32(0.0)
        for i in cutlass.range_constexpr(TOKENS):
            fade = fade + self.largest(x, gates[i])
            if cutlass.const_expr(self.grows):
                fade = fade + self.key_growth(x, token + i, exists)
        if lane == 0:
            fades[part, back] = fade
        for i in cutlass.range(3 * shares + bid * THREADS + tid, cute.size(told), shares * THREADS, unroll=1):
            told[i] = 0
        cute.arch.sync_threads()
        if warp == 0:
            walk, total = select_(c <= WALK, c, Int32(WALK + 1)), Float32(0.0)
            for chunk in cutlass.range_constexpr(WALK):
                for w in cutlass.range_constexpr(PARTS):
                    total = total + fades[w, chunk]
                walk = select_((total <= CLOSED) & (walk > chunk + 1), Int32(chunk + 1), walk)
            if lane == 0:
                told[bid] = walk

    def load_gates(self, x, token: Int64, exists: Int32) -> list:
        """The lane's gates of each of the warp's tokens. Of no meaning unless exists > 0."""
        words = self.channels * self.g_element.width // 32
        at = x.g + ((token * x.HV + x.hv) * self.K + x.channel) * (self.g_element.width // 8)
        stride = Int64(x.HV) * (self.K * self.g_element.width // 8)
        loaded = [ptx.ldg_if(exists, 0, at + i * stride, words) for i in range(TOKENS)]
        return [[w.bitcast(Float32) for w in raw] if self.g_element is Float32 else self.unpacked(raw) for raw in loaded]

    def largest(self, x, values) -> Float32:
        """log2 of the largest decay of a token's channels, from the lane's own gates; the same in all lanes."""
        if self.gate == "log":
            steps = [value * LOG2E for value in values]
        else:
            steps = [self.unit_decay(value, x.coefficients, j) * x.coefficients[2] for j, value in enumerate(values)]
        most = steps[0]
        for step in steps[1:]:
            most = ptx.fmax(most, step)
        bits = most.bitcast(Int32)  # in the order of the numbers once those below zero are turned round; a NaN of max.NaN above all
        bits = ptx.redux_max(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).bitcast(Float32)

    def key_growth(self, x, token: Int64, exists: Int32) -> Float32:
        """log2 max(1, |beta |k|^2 - 1|)."""
        square = Float32(1.0)
        if not self.l2norm:
            at = x.k + ((token * x.H + x.key_head) * self.K + x.channel) * 2
            square = Float32(0.0)
            for value in self.unpacked(ptx.ldg_if(exists, 0, at, self.channels // 2)):
                square = ptx.fma(value, value, square)
            for i in range(5):
                square = square + cute.arch.shuffle_sync_bfly(square, 1 << i)
        load = ptx.ldg_if if self.beta_wide else ptx.ldg_half_if
        at = x.beta.iterator.toint() + (token * x.HV + x.hv) * (self.beta_element.width // 8)
        reach = self.beta_value(load(exists, 0, at)[0]) * square - 1.0
        reach = ptx.fmax(reach, -reach)
        return select_(reach <= 1.0, Float32(0.0), ptx.lg2(reach))

    def unpacked(self, words) -> list[Float32]:
        return [value for word in words for value in ptx.unpack(word, self.pair)]

    def fake_arguments(self) -> tuple:
        """What to compile __call__ with, for TVM-FFI: contiguous; B, T, H, HV are free."""
        B, T, H, HV, flat, words = (cute.sym_int() for _ in range(6))
        raw = self.gate != "log"
        return (
            fake(self.io, B, T, H, self.K), fake(self.g_element, B, T, HV, self.K),
            make_fake_compact_tensor(self.beta_element, (B, T, HV), stride_order=(2, 1, 0)),
            fake(Float32, HV) if raw else None, fake(Float32, flat) if raw and self.dt_bias else None,
            fake(Int32, words), Int32(1), Float32(-5.0), make_fake_stream(use_tvm_ffi_env_stream=True),
        )  # fmt: skip


KdaCuts.kda_forward_cuts.set_name_prefix("kda_forward_cuts", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(arch: str, **params):
    """(jit function, fake arguments) of one configuration, to be compiled for any `arch` with TVM-FFI. params:
    KdaCuts.__init__; arguments of the compiled function: KdaCuts.__call__. ValueError: a parameter outside its domain."""
    fn = KdaCuts(**params)
    return fn, fn.fake_arguments()
