"""mbarriers, named barriers and setmaxnreg (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier",
"Miscellaneous Instructions: setmaxnreg").

One lane walks an mbarrier through its phases and writes down what every test answers; nothing else runs, so every answer is
decided. try_wait may give up early: it is asked only where the phase is over, and test_wait elsewhere.
"""

from __future__ import annotations

import numpy as np

from .copies import WAIT
from .program import Program, generator, kernel

PROLOGUE = "setp.ne.u32 %p7, %t, 0; @%p7 bra END; mov.b32 %r30, 0;"


def script(name: str, steps: list[tuple[str, int | None]]) -> Program:
    """steps: (PTX that leaves an answer in %r1, the answer by the manual), or (PTX, None) for one that answers nothing."""
    body, answers = [PROLOGUE], [a for _, a in steps if a is not None]
    for i, (code, answer) in enumerate(steps):
        body.append(code.format(b="%bar", i=i))
        if answer is not None:
            body.append("st.global.u32 [%y], %r1; add.u64 %y, %y, 4;")
    want = np.array(answers, np.uint32)
    text = kernel("\n".join([*body, "END:"]), ["x", "y"], shared=1024)
    return Program(name, text, {"x": np.arange(64, dtype=np.uint32)}, {"y": (want.shape, np.uint32)}, lambda _: {"y": want})


def asks(parity: int, answer: int):
    return f"mbarrier.test_wait.parity.shared.b64 %p1, [{{b}}], {parity}; selp.b32 %r1, 1, 0, %p1;", answer


def passes(parity: int):
    return f"mbarrier.try_wait.parity.shared.b64 %p1, [{{b}}], {parity}; selp.b32 %r1, 1, 0, %p1;", 1


ARRIVE = ("mbarrier.arrive.shared.b64 _, [{b}];", None)
COPY = ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%x], 64, [{b}];", None)


def until(parity: int):
    return "T{i}: mbarrier.try_wait.parity.shared.b64 %p1, [{b}], " + f"{parity}; @!%p1 bra T{{i}};", None


def init(count: int):
    return f"mbarrier.init.shared.b64 [{{b}}], {count}; fence.proxy.async.shared::cta;", None


def phases() -> Program:
    """Before the first phase is over parity 1 counts as passed and parity 0 does not; each completed phase swaps them."""
    steps = [init(3), asks(1, 1), asks(0, 0)]
    for phase in range(3):
        old, new = phase % 2, 1 - phase % 2
        steps += [ARRIVE, asks(old, 0), ARRIVE, asks(old, 0), ARRIVE, asks(old, 1), passes(old), asks(new, 0)]
    return script("mbarrier phases", steps)


def counted() -> Program:
    """Arrivals with counts, and arrive_drop, which takes its arrival out of all later phases."""
    many = ("mbarrier.arrive.shared.b64 _, [{b}], 4;", None)
    drop = ("mbarrier.arrive_drop.shared.b64 _, [{b}];", None)
    return script("mbarrier counts", [init(5), many, asks(0, 0), drop, asks(0, 1), asks(1, 0), many, asks(1, 1), asks(0, 0)])


def transactions() -> Program:
    """A phase with bytes expected ends when all arrivals are there and all bytes, in either order."""
    expect = ("mbarrier.arrive.expect_tx.shared.b64 _, [{b}], 64;", None)
    alone = ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{b}], 128;", None)
    read = ("ld.shared.u32 %r1, [%smem+60];", 15)
    return script("mbarrier transactions", [
        init(1), expect, asks(0, 0), COPY, until(0), asks(0, 1), asks(1, 0), read,
        alone, asks(1, 0), COPY, COPY, ARRIVE, until(1), asks(1, 1), asks(0, 0), read,
        ("add.u32 %bar, %bar, 8;", None),
        init(2), expect, COPY, ("nanosleep.u32 20000;", None), asks(0, 0), ARRIVE, until(0), asks(0, 1),
    ])  # fmt: skip


def states() -> Program:
    """test_wait on the state that arrive returned, and the arrivals that were still missing in it."""

    def test(state: str, answer: int):
        return f"mbarrier.test_wait.shared.b64 %p1, [{{b}}], {state}; selp.b32 %r1, 1, 0, %p1;", answer

    def arrive(state: str):
        return f"mbarrier.arrive.shared.b64 {state}, [{{b}}];", None

    def pending(state: str, answer: int):
        return f"mbarrier.pending_count.b64 %r1, {state};", answer

    return script("mbarrier states", [
        init(2), arrive("%rd1"), pending("%rd1", 2), test("%rd1", 0), arrive("%rd2"), pending("%rd2", 1), test("%rd1", 1),
        test("%rd2", 1),
        arrive("%rd3"), test("%rd3", 0), test("%rd2", 1), ARRIVE, test("%rd3", 1),
    ])  # fmt: skip


def ring() -> Program:
    """Warp 0 fills a two-slot ring eight times with numbered words, warp 1 empties it."""
    body = f"""
setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [%bar], 32; @%p1 mbarrier.init.shared.b64 [%bar+8], 32;
@%p1 mbarrier.init.shared.b64 [%bar+16], 32; @%p1 mbarrier.init.shared.b64 [%bar+24], 32; bar.sync 0;
and.b32 %r4, %t, 31; mov.b32 %r5, 0; setp.ge.u32 %p2, %t, 32;
LOOP: and.b32 %r6, %r5, 1; shr.u32 %r7, %r5, 1; and.b32 %r7, %r7, 1; xor.b32 %r8, %r7, 1;
mad.lo.u32 %r9, %r6, 8, %bar; add.u32 %r10, %r9, 16; mad.lo.u32 %r11, %r6, 128, %smem; mad.lo.u32 %r11, %r4, 4, %r11;
@%p2 bra CONSUME;
{WAIT.format(n=1, bar="%r10", parity="%r8")}
mad.lo.u32 %r12, %r5, 100, %r4; st.shared.u32 [%r11], %r12; mbarrier.arrive.shared.b64 _, [%r9]; bra NEXT;
CONSUME: {WAIT.format(n=2, bar="%r9", parity="%r7")}
ld.shared.u32 %r12, [%r11]; mad.lo.u32 %r13, %r5, 32, %r4; mad.wide.u32 %rd1, %r13, 4, %y; st.global.u32 [%rd1], %r12;
mbarrier.arrive.shared.b64 _, [%r10];
NEXT: add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 8; @%p3 bra LOOP;"""
    want = (np.arange(8)[:, None] * 100 + np.arange(32)).astype(np.uint32)
    return Program(
        "mbarrier ring", kernel(body, ["y"], shared=1024), {}, {"y": ((8, 32), np.uint32)}, lambda _: {"y": want}, block=64
    )


def named() -> Program:
    """bar.arrive and bar.sync on barrier 3 for two of three warps: warp 0 leaves words, warp 1 reads them, warp 2 is apart."""
    body = """setp.lt.u32 %p1, %t, 32; setp.ge.u32 %p2, %t, 64; @%p2 bra END; and.b32 %r1, %t, 31;
mad.lo.u32 %r2, %r1, 4, %smem; @!%p1 bra READ;
mad.wide.u32 %rd1, %r1, 4, %x; ld.global.u32 %r3, [%rd1]; st.shared.u32 [%r2], %r3; bar.arrive 3, 64; bra END;
READ: bar.sync 3, 64; xor.b32 %r4, %r2, 124; ld.shared.u32 %r3, [%r4]; mad.wide.u32 %rd1, %r1, 4, %y;
st.global.u32 [%rd1], %r3; END:"""
    x = generator("named barrier").integers(0, 1 << 32, 32, np.uint64).astype(np.uint32)
    return Program(
        "bar.sync named",
        kernel(body, ["x", "y"], shared=1024),
        {"x": x},
        {"y": ((32,), np.uint32)},
        lambda i: {"y": i["x"][::-1]},
        block=96,
    )


def registers() -> Program:
    """One warpgroup gives registers up and another takes them; values survive. Threads of a CTA hold 65,536 registers at most."""
    body = """shr.u32 %r1, %t, 7; setp.eq.u32 %p1, %r1, 0; mad.wide.u32 %rd1, %t, 4, %x; ld.global.u32 %r2, [%rd1]; @%p1 bra LESS;
setmaxnreg.inc.sync.aligned.u32 160; bra JOIN; LESS: setmaxnreg.dec.sync.aligned.u32 40;
JOIN: xor.b32 %r2, %r2, %t; mad.wide.u32 %rd2, %t, 4, %y; st.global.u32 [%rd2], %r2;"""
    x = generator("setmaxnreg").integers(0, 1 << 32, 256, np.uint64).astype(np.uint32)
    text = kernel(body, ["x", "y"], directives=".maxntid 256, 1, 1 .minnctapersm 1 .maxnreg 128")
    manual = lambda i: {"y": i["x"] ^ np.arange(256, dtype=np.uint32)}  # noqa: E731
    return Program("setmaxnreg", text, {"x": x}, {"y": ((256,), np.uint32)}, manual, block=256)


PROGRAMS = [phases(), counted(), transactions(), states(), ring(), named(), registers()]
