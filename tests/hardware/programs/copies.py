"""cp.async and cp.async.bulk without a tensor map (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy").

Every program copies into a shared array that holds a pattern, waits, and writes the whole array out: what was copied, what was
zero-filled and what was left alone all show.
"""

from __future__ import annotations

import numpy as np

from .program import Program, generator, kernel, lanes

BYTES = 4096
PATTERN = """mov.b32 %r1, %t;
L0: mad.lo.u32 %r2, %r1, 4, %smem; xor.b32 %r3, %r1, 0x5a5a0000; st.shared.u32 [%r2], %r3;
add.u32 %r1, %r1, 32; setp.lt.u32 %p7, %r1, 1024; @%p7 bra L0; bar.warp.sync -1;"""
DUMP = """bar.warp.sync -1; mov.b32 %r1, %t;
L9: mad.lo.u32 %r2, %r1, 4, %smem; ld.shared.u32 %r3, [%r2]; mad.wide.u32 %rd9, %r1, 4, %y; st.global.u32 [%rd9], %r3;
add.u32 %r1, %r1, 32; setp.lt.u32 %p7, %r1, 1024; @%p7 bra L9;"""
WAIT = "W{n}: mbarrier.try_wait.parity.shared.b64 %p6, [{bar}], {parity}; @!%p6 bra W{n};"
INIT = ("setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [%bar], 1; @%p1 fence.mbarrier_init.release.cluster;"
        "fence.proxy.async.shared::cta; bar.warp.sync -1;")  # fmt: skip
OUT = {"y": ((BYTES // 4,), np.uint32)}


def pattern() -> np.ndarray:
    return np.arange(BYTES // 4, dtype=np.uint32) ^ np.uint32(0x5A5A0000)


def source(name: str) -> np.ndarray:
    return generator(name).integers(0, 1 << 32, BYTES // 4, np.uint64).astype(np.uint32)


def per_lane(kind: str, size: int, given: bool) -> Program:
    """cp.async of one piece a lane, backwards with gaps; given: lane i's src-size is min(i, size), the rest is zero-filled."""
    name = f"cp.async.{kind}.shared.global {size}{' src-size' if given else ''}"

    def manual(inputs):
        out, x = pattern().view(np.uint8), inputs["x"].view(np.uint8)
        for lane in range(32):
            at, read = size * 2 * (31 - lane), min(lane, size) if given else size
            out[at : at + size] = 0
            out[at : at + read] = x[size * lane : size * lane + read]
        return {"y": out.view(np.uint32)}

    body = f"""{PATTERN}
sub.u32 %r4, 31, %t; mad.lo.u32 %r4, %r4, {2 * size}, %smem; mad.wide.u32 %rd1, %t, {size}, %x; min.u32 %r5, %t, {size};
cp.async.{kind}.shared.global [%r4], [%rd1], {size}{", %r5" if given else ""}; cp.async.commit_group; cp.async.wait_group 0;
{DUMP}"""
    return Program(name, kernel(body, ["x", "y"], shared=BYTES), {"x": source(name)}, OUT, manual)


def groups() -> Program:
    """Two groups in flight, the older waited for with wait_group 1, the other with wait_all."""

    def manual(inputs):
        return {"y": np.concatenate([inputs["x"][:256], pattern()[256:]])}

    body = f"""{PATTERN}
mad.lo.u32 %r4, %t, 16, %smem; mad.wide.u32 %rd1, %t, 16, %x;
cp.async.cg.shared.global [%r4], [%rd1], 16; cp.async.commit_group;
cp.async.cg.shared.global [%r4+512], [%rd1+512], 16; cp.async.commit_group;
cp.async.wait_group 1; cp.async.wait_all; {DUMP}"""
    return Program("cp.async groups", kernel(body, ["x", "y"], shared=BYTES), {"x": source("cp.async groups")}, OUT, manual)


def bulk_load(hint: bool) -> Program:
    """Two copies that complete one phase: 1,040 bytes to offset 48 and 16 bytes to offset 2048."""

    def manual(inputs):
        out = pattern()
        out[12 : 12 + 260], out[512:516] = inputs["x"][4:264], inputs["x"][1000:1004]
        return {"y": out}

    op = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" + (".L2::cache_hint" if hint else "")
    extra, policy = (", %rd8", "createpolicy.fractional.L2::evict_first.b64 %rd8, 1.0;") if hint else ("", "")
    body = f"""{PATTERN} {INIT} {policy} add.u64 %rd1, %x, 16; add.u64 %rd2, %x, 4000; add.u32 %r4, %smem, 48;
add.u32 %r5, %smem, 2048;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1056;
@%p1 {op} [%r4], [%rd1], 1040, [%bar]{extra}; @%p1 {op} [%r5], [%rd2], 16, [%bar]{extra};
{WAIT.format(n=1, bar="%bar", parity=0)} {DUMP}"""
    return Program(op, kernel(body, ["x", "y"], shared=BYTES), {"x": source(op)}, OUT, manual)


def bulk_store(fence: str = ".shared::cta") -> Program:
    """Shared to global in two bulk groups; y keeps its zeros elsewhere."""

    def manual(inputs):
        out = np.zeros(BYTES // 4, np.uint32)
        out[4:264], out[700:704] = pattern()[8:268], pattern()[1020:1024]
        return {"y": out}

    op = "cp.async.bulk.global.shared::cta.bulk_group"
    body = f"""{PATTERN} fence.proxy.async{fence}; bar.warp.sync -1; setp.eq.u32 %p1, %t, 0; @!%p1 bra END;
add.u64 %rd1, %y, 16; add.u64 %rd2, %y, 2800; add.u32 %r4, %smem, 32; add.u32 %r5, %smem, 4080;
{op} [%rd1], [%r4], 1040; cp.async.bulk.commit_group; {op} [%rd2], [%r5], 16; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1; cp.async.bulk.wait_group 0; END:"""
    name = op if fence else f"{op} fence.proxy.async"
    return Program(name, kernel(body, ["y"], shared=BYTES), {}, OUT, manual)


def prefetched() -> Program:
    """A prefetch changes nothing."""
    name = "prefetch.global.L2"
    return lanes(name, f"{name} [%x]; mov.b32 y, x;", {"x": source(name)}, {"y": np.uint32}, lambda i: {"y": i["x"]})


PROGRAMS = [
    *(per_lane("ca", size, given) for size in (4, 8, 16) for given in (False, True)),
    *(per_lane("cg", 16, given) for given in (False, True)), groups(), bulk_load(False), bulk_load(True), bulk_store(),
    bulk_store(fence=""), prefetched(),
]  # fmt: skip
