"""Rung 015 for Blackwell (sm_100a, sm_103a): SCAN on tcgen05 (the rest: forward.py; the roles: scan_sm100.py, prep.py;
who prepares and walks which chunks: helpers.py, shares.py).

Compiled and run in the emulator; never run on a GPU, never timed.

    role     warps    does                                                             registers (512 threads)
    RECUR    0..3     -beta r, v', the state; its first warp issues every product      240 (setmaxnreg)
    OUTPUT   4..7     o, and its TMA store; v by TMA                                   96
    SHIP     1        in a helper for RECUR and OUTPUT: a chunk's operands out         128
    PREP     K / 16   everything else (forward.py)                                     88
Warp w of a group owns lanes 32 (w % 4) to 32 (w % 4) + 31 of tensor memory.

The chain of a chunk, each step waiting for the one before (^T: as tensor memory and registers hold it, [V, .]):

    step                                   who            as issued or computed                    rounding
    io(h^T) to tensor memory               RECUR                                                   h to io
    R    = kG h                            MMA            R^T    = io(h^T) kG^T
    OS   = qG h                            MMA            O^T    = io(h^T) qG^T
    h    = 2^P_4 h, beside R               RECUR          h^T diag(2^P_4)                          fp32, in registers
    -b r = beta (R - v)                    RECUR          to tensor memory                         beta r to io
    v'   = A beta r                        MMA            v'^T   = io(-b r^T) (-A)^T
    v'   to tensor memory                  RECUR                                                   v' to io
    DH   = kg^T v'                         MMA            DH^T   = io(v'^T) kg
    O    = OS + Aqk v'                     MMA            O^T   += io(v'^T) Aqk^T
    h    = h + DH                          RECUR          h^T + DH^T                               fp32, in registers
    o    = scale O, off the chain          OUTPUT                                                  o to io

Every product has V as its M (64 or 128 columns, the CTA's V tile) and A in tensor memory, so that the state and what
comes of it need no shared memory: the ring is that of Hopper, byte for byte. tcgen05.mma kind::f16, fp32 accumulators:

    product    M x N x K-steps    A (columns)         B                D (columns)
    R          V x 64 x K/16      io(h^T) (0)         kG               128..191
    OS         V x 64 x K/16      io(h^T) (0)         qG               384 or 448, + 64: the slot's
    v'         V x 64 x 4         -b r^T (64)         -A               192..255
    DH         V x K  x 4         v'^T (96)           kg (MN-major)    256..255 + K
    O          V x 64 x 4         v'^T (96)           Aqk              that of OS

    TMEM columns   0 io(h^T), K/2   64 -b r^T, 32   96 v'^T, 32   128 R   192 v'   256 DH, K   384 O, two stages
    512 are allocated, in a helper none. Two io values share a column. M = 64 uses lanes 0 to 15 of each warp's 32.

    mbarrier   stages   count   arrives                       waits             says
    ready      2        PREP    PREP (a helper's chunk: and   RECUR (SHIP)      the slot's operands are there
                        +bytes  the copies of its bytes)
    value      2        bytes   OUTPUT's first warp, TMA      RECUR             v is (one for each 64 columns of V)
    r_full     1        1       commit after R                RECUR             R is in tensor memory
    v_full     1        1       commit after v'               RECUR             v' is
    dh_full    1        1       commit after DH               RECUR             DH is
    o_full     2        1       commit after O                OUTPUT            O is, and the tensor core has done with the slot
    o_empty    2        128     OUTPUT                        RECUR's first     O is in registers
    free       2        256     RECUR after its last read of  PREP, OUTPUT      slot, v included, may be written
                                the slot, OUTPUT after o_full
    bar.sync   3: RECUR, what a product reads is written and what it overwrites is read; 4: OUTPUT, o is in shared
               memory; 5: both, tensor memory can be freed; 6: RECUR, at a share's end

A, R, v' and DH in tensor memory need no barriers of the other direction. A commit tracks every product issued before
it, so r_full says that v' and DH of the chunk before have been computed from -b r and v', and dh_full that R and OS
are done with io(h^T); and bar.sync 3 stands between RECUR's reading of an accumulator and the product that overwrites
it. The products are issued by a warp of RECUR, not by one of their own: the chain is serial, that warp is the one that
waits for each step anyway, and 512 threads leave no registers for more.

tcgen05.wait::st and ::ld complete this warp's copies, tcgen05.fence orders them around each bar.sync and mbarrier.
OUTPUT waits for `free` before it writes o over v; the slot takes the next v once its o has been read by TMA.
"""

from __future__ import annotations

import enum
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from . import ptx
from .forward import Forward
from .helpers import Helpers
from .scan_sm100 import GROUP, MEET_SCAN, ScanSm100
from .shares import Shares
from .tiles import CHUNK, SLOTS, WG_V

ARCHS = ("sm_100a", "sm_103a")
REGISTERS = {"RECUR": 240, "OUTPUT": 96}  # of a thread
COLUMNS = 512  # of tensor memory: all of it


class Own(enum.IntEnum):
    """SCAN's own 8-byte words in shared memory: mbarriers (of those with two stages, the first), and where tensor
    memory's address is put."""

    R_FULL = 0
    V_FULL = 1
    DH_FULL = 2
    O_FULL = 3
    O_EMPTY = 5
    TENSOR_MEMORY = 7


class OnBlackwell(Forward, ScanSm100):
    """SCAN on tcgen05."""

    own_words = Own.TENSOR_MEMORY + 1

    def scan_threads(self) -> int:
        return 2 * GROUP

    @cute.jit
    def start(self, bars, warp: Int32, helps):
        if warp == 0 and not helps:
            with cute.arch.elect_one():
                for bar in (Own.R_FULL, Own.V_FULL, Own.DH_FULL):
                    cute.arch.mbarrier_init(bars.own + bar, 1)
                for s in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(bars.own + Own.O_FULL + s, 1)
                    cute.arch.mbarrier_init(bars.own + Own.O_EMPTY + s, GROUP)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(COLUMNS, cute.recast_ptr(bars.own + Own.TENSOR_MEMORY, dtype=Int32))
            cute.arch.relinquish_tmem_alloc_permit()

    @cute.jit
    def run_groups(self, operands, s_v, v, o, bars, at, warp: Int32):
        word = cute.recast_ptr(bars.own + Own.TENSOR_MEMORY, dtype=Int32)
        columns = cute.arch.retrieve_tmem_ptr(Float32, 16, word)
        bars = SimpleNamespace(
            ready=bars.ready, free=bars.free, value=bars.value, r_full=bars.own + Own.R_FULL,
            v_full=bars.own + Own.V_FULL, dh_full=bars.own + Own.DH_FULL, o_full=bars.own + Own.O_FULL,
            o_empty=bars.own + Own.O_EMPTY,
        )  # fmt: skip
        tools = partial(self.tools, operands, s_v, word, columns, warp)
        common = tools()  # by rows two words would be spilled if each role had its own, by shares if they had them in common
        if warp < GROUP // 32:
            self.set_registers(REGISTERS["RECUR"])
            # Copies, as in Forward.work.
            x, told = SimpleNamespace(**vars(tools() if self.tells else common)), SimpleNamespace(**vars(at.told))
            at_recur = SimpleNamespace(**vars(at) | {"plan": SimpleNamespace(**vars(at.plan)), "address": dict(at.address), "told": told})
            self.run_recur(x, SimpleNamespace(**vars(bars)), at_recur)
        else:
            self.set_registers(REGISTERS["OUTPUT"])
            self.run_output(tools() if self.tells else common, bars, s_v, v, o, at)
        cute.arch.barrier(barrier_id=MEET_SCAN, number_of_threads=2 * GROUP)
        if warp == 0:
            cute.arch.dealloc_tmem(columns, COLUMNS)

    def tools(self, operands, s_v, word, columns, warp: Int32) -> SimpleNamespace:
        """The thread's place, the products, and where the factors lie."""
        tid, _, _ = cute.arch.thread_idx()
        return SimpleNamespace(
            **self.place_scan(warp, tid, ptx.lds(word.toint()), s_v), p=self.products(operands, columns),
            decay=operands.decay.iterator.toint(), beta=operands.beta.iterator.toint(),
        )  # fmt: skip

    def columns_of(self, tma, s_v, piece) -> list[SimpleNamespace]:
        """v or o of a piece's strip, for each 64 columns; a column of the result a chunk."""
        tiles = [cute.local_tile(s_v, (WG_V, CHUNK), (g, 0, None)) for g in range(self.groups)]
        coords = [(piece.u * self.groups + g, None, piece.hv, piece.b) for g in range(self.groups)]
        return [self.tma(*tma, tile, (WG_V, CHUNK), coord) for tile, coord in zip(tiles, coords)]


class KdaForward(OnBlackwell, Helpers):
    """A CTA walks a row, or prepares chunks for those that do."""

    @cute.jit
    def run_scan(self, operands, s_v, v, o, bars, at, warp: Int32):
        """One of SCAN's warps, or of SHIP's. v, o: (TMA atom, tensor)."""
        if at.plan.helps:
            self.ship(at, bars, warp)
        else:
            self.run_groups(operands, s_v, v, o, bars, at, warp)

    @cute.jit
    def run_recur(self, x, bars, at):
        self.recur(x, bars, at, self.row_piece(at.plan))

    @cute.jit
    def run_output(self, x, bars, s_v, v, o, at):
        piece = self.row_piece(at.plan)
        self.output(x, bars, self.columns_of(v, s_v, piece), self.columns_of(o, s_v, piece), at.scale, piece)
        self.output_is_read(x)


class KdaShares(Shares, OnBlackwell):
    """A CTA walks its share of all chunks."""

    @cute.jit
    def run_scan(self, operands, s_v, v, o, bars, at, warp: Int32):
        self.run_groups(operands, s_v, v, o, bars, at, warp)

    @cute.jit
    def run_recur(self, x, bars, at):
        plan, told, bid, peaks = at.plan, SimpleNamespace(**vars(at.told)), at.plan.bid, at.address["peaks"]
        jobs, drop = self.jobs(plan), self.dropped_at(plan, told.walks)
        dropped, least, n = Int32(0), Int32(0), Int32(0)
        while n < jobs:
            piece = self.piece_at(plan, n, drop)
            was, low = self.recur(x, bars, at, piece)
            dropped, least = cutlass.max(dropped, was), select_(n == 0, low, least)
            n += piece.stop - piece.first
        self.tell(told, bid, peaks, dropped, least, GROUP // 32, MEET_SCAN + 1)

    @cute.jit
    def run_output(self, x, bars, s_v, v, o, at):
        plan, jobs, n = at.plan, self.jobs(at.plan), Int32(0)
        while n < jobs:
            piece = self.piece_at(plan, n, Int32(0))
            self.output(x, bars, self.columns_of(v, s_v, piece), self.columns_of(o, s_v, piece), at.scale, piece)
            n += piece.stop - piece.first
        self.output_is_read(x)


def build(arch: str, shares: bool = False, **params):
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_100a" or "sm_103a") with
    TVM-FFI. shares: the kernel of even shares. params and what they may be: Forward.__init__. Arguments of the compiled function: those of
    Forward.__call__. ValueError: a parameter outside its domain.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch}, accepted {', '.join(ARCHS)}")
    fn = (KdaShares if shares else KdaForward)(**params)
    return fn, fn.fake_arguments()
