"""Rung 015 for Hopper (sm_90a): SCAN on wgmma (the rest: forward.py; the roles: scan.py, prep.py,
helpers.py).

    product  equation                       as issued (^T marks what registers hold)     rounding
    R        r   = v - kG h                 -r^T = -v^T + io(h^T) kG^T                    h to io
    A        v'  = A beta r                 v'^T = io(-r^T diag(beta)) (-A)^T             beta r to io
    DH       h   = 2^P_4 h + kg^T v'        h^T  = h^T diag(2^P_4) + io(v'^T) kg          v' to io; h stays fp32
    O        o   = scale (qG h + Aqk v')    o^T  = scale (io(h^T) qG^T + io(v'^T) Aqk^T)  o to io at the store

    role   warps                          does                                        registers (512 threads)
    SCAN   4 for each 64 columns of V     products R, A, DH, O; its v and o by TMA     168 (setmaxnreg)
    SHIP   1, in a helper for SCAN        a chunk's operands out, by bulk copies       168
    PREP   K / 16                         everything else; q, k and gate by TMA        88

wgmma, M = 64 rows of V, A from registers: R m64n64k16 x K/16; DH m64nKk16 x 4; A and O for 32 tokens at a time (h,
io(h), r and v' fill the registers), m64n32k16 x 2 and x 4 (the upper right quarters of A and Aqk are zero), O m64n32k16
x K/16 twice besides. An accumulator's registers are, in order, the A fragment of the next product (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"), so each step of the chain is a cast.

    mbarrier  ring  count                         arrives                               waits
    value     2 x warpgroups of SCAN, 1 + bytes   SCAN's first warp (v)                 the same warpgroup
    bar.sync  3 + g: warpgroup g of SCAN, o written before its TMA store; the next: all of SCAN, at a share's end
A tile's slot is free for the next v once its o has been read: the thread that stores o waits for that, then loads.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from .forward import Forward
from .helpers import Helpers
from .scan import Scan
from .shares import Shares

ARCHS = ("sm_90a",)
REGISTERS = 168  # of a thread of SCAN


class OnHopper(Forward, Scan):
    """SCAN on wgmma."""

    def scan_threads(self) -> int:
        return 128 * self.groups


class KdaForward(OnHopper, Helpers):
    """A CTA walks a row, or prepares chunks for those that do."""

    @cute.jit
    def run_scan(self, operands, s_v, v, o, bars, at, warp: Int32):
        """One of SCAN's warps, or of SHIP's. v, o: (TMA atom, tensor)."""
        self.set_registers(REGISTERS)
        if at.plan.helps:
            self.ship(at, bars, warp)
        else:
            self.scan(operands, s_v, v, o, bars, at, self.row_piece(at.plan), warp // 4)
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class KdaShares(Shares, OnHopper):
    """A CTA walks its share of all chunks."""

    @cute.jit
    def run_scan(self, operands, s_v, v, o, bars, at, warp: Int32):
        """One of SCAN's warps. v, o: (TMA atom, tensor)."""
        self.set_registers(REGISTERS)
        plan, told, bid, peaks = at.plan, SimpleNamespace(**vars(at.told)), at.plan.bid, at.address["peaks"]
        jobs, drop = self.jobs(plan), self.dropped_at(plan, told.walks)
        dropped, least, n = Int32(0), Int32(0), Int32(0)
        while n < jobs:
            piece = self.piece_at(plan, n, drop)
            was, low = self.scan(operands, s_v, v, o, bars, at, piece, warp // 4)
            dropped, least = cutlass.max(dropped, was), select_(n == 0, low, least)
            n += piece.stop - piece.first
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.tell(told, bid, peaks, dropped, least, 4 * self.groups, 3 + self.groups)


def build(arch: str, shares: bool = False, **params):
    """(jit function, fake arguments) of one configuration, to be compiled for `arch` ("sm_90a") with TVM-FFI. shares: the
    kernel of even shares. params and what they may be: Forward.__init__. Arguments of the compiled function: those of Forward.__call__.
    ValueError: a parameter outside its domain.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch}, accepted {', '.join(ARCHS)}")
    fn = (KdaShares if shares else KdaForward)(**params)
    return fn, fn.fake_arguments()
