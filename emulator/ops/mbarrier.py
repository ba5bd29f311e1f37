"""mbarrier instructions (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"); state in
hw.mbarrier."""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..engine import Wait
from ..errors import ProtocolError
from ..hw.errors import HwError
from ..hw.mbarrier import MBarrier
from ..memory import SHARED_WINDOW, align_check


def table(m):
    """{(cta, offset): MBarrier} of the batch."""
    return m.units.setdefault("mbarrier", {})


def find(m, cta, offset):
    b = table(m).get((cta, offset))
    if b is None:
        raise ProtocolError(f"shared address 0x{offset:x} of CTA {m.cta_name(cta)} holds no initialised mbarrier")
    return b


def signal(m, cta, offset, nbytes=None):
    """An asynchronous operation reports to an mbarrier: complete_tx of nbytes, or one arrival when nbytes is None."""
    b = find(m, cta, offset)
    try:
        b.arrive(1) if nbytes is None else b.complete_tx(nbytes)
    except HwError as e:
        raise ProtocolError(f"mbarrier 0x{offset:x}: {e}") from e
    m.events += 1
    if m.watch:
        m.watch.mbarrier(m, None, None, "arrive" if nbytes is None else "complete_tx", cta, offset, nbytes)


def places(m, f, address):
    """[(cta, offset)] per lane of shared mbarrier addresses, checked for alignment."""
    align_check(address, 8, "mbarrier address")
    off = (address & np.uint64(SHARED_WINDOW - 1)).astype(np.int64).tolist()
    return list(zip(m.cta_of_lane[f.lanes].tolist(), off))


def _spaces(ins, mods):
    mods.one(("release", "acquire", "relaxed")), mods.one(("cta", "cluster"))
    mods.one(("shared", "shared::cta", "shared::cluster"))
    mods.flag("b64")
    mods.done()


@handler("mbarrier.init", "mbarrier.inval")
def init(m, ins, mods):
    """mbarrier.init, mbarrier.inval."""
    _spaces(ins, mods)
    starts = ins.parts[1] == "init"
    address = m.address(ins, ins.operands[0], "shared")
    count = m.read(ins, ins.operands[1], "u32") if starts else None

    def run(f):
        m.shared.locate(address(f), m.cta_of_lane[f.sel], 8, True)
        for lane, key in zip(f.lanes.tolist(), places(m, f, address(f))):
            if starts:
                if key in table(m) and table(m)[key].tx:
                    raise ProtocolError(f"mbarrier 0x{key[1]:x} is initialised again while transfers are outstanding")
                table(m)[key] = MBarrier.init(int(count[lane]))
            else:
                find(m, *key)
                del table(m)[key]
            if m.watch:
                m.watch.mbarrier(m, f, ins, "init" if starts else "inval", *key, None)

    return run


@handler("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(m, ins, mods):
    """mbarrier.arrive{.expect_tx}{.noComplete}, mbarrier.arrive_drop: optional state, address, optional count or
    byte count."""
    expect, no_complete = mods.flag("expect_tx"), mods.flag("noComplete")
    drop = ins.parts[1] == "arrive_drop"
    _spaces(ins, mods)
    ops = list(ins.operands)
    d = None
    if not isinstance(ops[0], ptx.Addr):
        first = ops.pop(0)
        d = None if isinstance(first, ptx.Sink) else m.write(ins, first, "b64")
    address = m.address(ins, ops[0], "shared")
    number = m.read(ins, ops[1], "u32") if len(ops) > 1 else np.broadcast_to(np.uint32(1), (m.lanes,))

    def run(f):
        for lane, key in zip(f.lanes.tolist(), places(m, f, address(f))):
            b, n = find(m, *key), int(number[lane])
            try:
                if expect:
                    b.expect_tx(n)
                state = b.arrive(1 if expect else n, no_complete=no_complete, drop=drop)
            except HwError as e:
                raise ProtocolError(f"mbarrier 0x{key[1]:x}: {e}") from e
            if d is not None:
                d[lane] = state
            if m.watch:
                m.watch.mbarrier(m, f, ins, "arrive", *key, n if expect else None)
        m.events += 1

    return run


@handler("mbarrier.expect_tx", "mbarrier.complete_tx")
def expect_tx(m, ins, mods):
    """mbarrier.expect_tx, mbarrier.complete_tx."""
    _spaces(ins, mods)
    what = ins.parts[1]
    address, number = m.address(ins, ins.operands[0], "shared"), m.read(ins, ins.operands[1], "u32")

    def run(f):
        for lane, key in zip(f.lanes.tolist(), places(m, f, address(f))):
            try:
                getattr(find(m, *key), what)(int(number[lane]))
            except HwError as e:
                raise ProtocolError(f"mbarrier 0x{key[1]:x}: {e}") from e
            if m.watch:
                m.watch.mbarrier(m, f, ins, what, *key, int(number[lane]))
        m.events += 1

    return run


@handler("mbarrier.test_wait", "mbarrier.try_wait")
def wait(m, ins, mods):
    """mbarrier.test_wait, mbarrier.try_wait{.parity}.

    A wait that is not satisfied suspends the thread until it is; when nothing else can run it gives up and returns
    false, as try_wait may at any time (with a seed it sometimes does so at once). That is a legal schedule of
    test_wait too: it runs late.
    """
    parity = mods.flag("parity")
    _spaces(ins, mods)
    p = m.write(ins, ins.operands[0], "pred")
    address = m.address(ins, ins.operands[1], "shared")
    phase = m.read(ins, ins.operands[2], "u32" if parity else "b64")

    def passed(key, p):
        b = find(m, *key)
        try:
            return b.test_parity(p) if parity else b.test_state(p)
        except HwError as e:
            raise ProtocolError(f"mbarrier 0x{key[1]:x}: {e}") from e

    def test(f):
        at, ph = address(f), phase[f.sel]
        if (at == at[0]).all() and (ph == ph[0]).all():  # the usual case: one barrier in every CTA
            align_check(at[:1], 8, "mbarrier address")
            off, p = int(at[0]) & SHARED_WINDOW - 1, int(ph[0])
            ctas = m.cta_of_warp[f.warps]
            results = {c: passed((c, off), p) for c in np.unique(ctas).tolist()}
            if len(set(results.values())) == 1:
                return np.full(f.n, next(iter(results.values())))
            return np.array([results[c] for c in m.cta_of_lane[f.lanes].tolist()])
        return np.array([passed(k, int(p)) for k, p in zip(places(m, f, at), ph)])

    def describe(f):
        (cta, off), lane = places(m, f, address(f))[0], int(f.lanes[0])
        what = "parity" if parity else "state"
        return f"mbarrier 0x{off:x} for {what} {int(phase[lane])}: {find(m, cta, off).missing()}"

    def expire(f):
        p[f.sel] = False

    def run(f):
        ok = test(f)
        if ok.all() or (m.rng is not None and not ok.any() and m.rng.random() < 0.2):
            p[f.sel] = ok
            if m.watch and ok.all():
                for key in dict.fromkeys(places(m, f, address(f))):
                    m.watch.mbarrier(m, f, ins, "passed", *key, None)
            return None
        return Wait(test, describe, retry=True, expire=expire)

    return run


@handler("mbarrier.pending_count")
def pending(m, ins, mods):
    """mbarrier.pending_count."""
    mods.flag("b64")
    mods.done()
    d, a = m.write(ins, ins.operands[0], "u32"), m.read(ins, ins.operands[1], "b64")

    def run(f):
        d[f.sel] = (a[f.sel] & np.uint64(0xFFFFF)).astype(np.uint32)

    return run


@handler("mapa")
def mapa(m, ins, mods):
    """mapa: address of a shared variable in another CTA of the cluster; here clusters have one CTA, so the address
    itself."""
    mods.one(("shared::cluster",))
    kind = mods.type()
    mods.done()
    if m.cluster != (1, 1, 1):
        raise unsupported(ins, "clusters larger than one CTA")
    d, a = m.write(ins, ins.operands[0], kind), m.read(ins, ins.operands[1], kind)

    def run(f):
        d[f.sel] = a[f.sel]

    return run
