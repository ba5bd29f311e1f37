"""PTX ISA, "Control Flow Instructions", and barriers of "Parallel Synchronization and Communication Instructions"."""

import numpy as np

from .. import ptx
from ..bind import handler, unsupported
from ..engine import EXIT, PARK, Wait
from ..errors import EmulatorError, ProtocolError


@handler("bra")
def bra(m, ins, mods):
    """Control Flow: bra."""
    mods.flag("uni")
    mods.done()
    target = m.kernel.label(ins.scope, getattr(ins.operands[0], "name", None))
    if target is None:
        raise unsupported(ins, "branch target is not a label of this kernel")
    return lambda f: target


@handler("brx")
def brx(m, ins, mods):
    """Control Flow: brx.idx."""
    raise unsupported(ins, "indexed branches need .branchtargets lists")


@handler("call")
def call(m, ins, mods):
    """Control Flow: call: functions (device printf, assertions) are not modelled."""
    raise unsupported(ins, "calls need .func bodies and call frames")


@handler("ret", "exit")
def ret(m, ins, mods):
    """Control Flow: ret (from the entry function) and exit."""
    mods.flag("uni")
    mods.done()
    return lambda f: EXIT


@handler("trap")
def trap(m, ins, mods):
    """Miscellaneous: trap."""

    def run(f):
        raise EmulatorError("the kernel executed trap")

    return run


@handler("pragma", "nop", "nanosleep", "brkpt")
def no_effect(m, ins, mods):
    """Miscellaneous: pragma, brkpt, nanosleep, which may return at once; no effect on results."""
    return lambda f: None


def whole_warps(f):
    """Lanes [warps, 32] for .aligned instructions, or None when a warp is not complete yet."""
    return f.lanes.reshape(-1, 32) if f.whole else None


def _barrier(m, ins, mods, action):
    """Arrive at barrier a (of the CTA) with expected thread count b; `action` sync, arrive or red."""
    mods.flag("aligned")
    op = mods.one(("popc", "and", "or"))
    kind = mods.one(("u32", "pred"))
    mods.done()
    operands = ins.operands
    if action == "red":
        raise unsupported(ins, f"barrier reduction {op}.{kind}")
    barrier = m.read(ins, operands[0], "u32") if operands else np.zeros(m.lanes, np.uint32)
    threads = m.read(ins, operands[1], "u32") if len(operands) > 1 else None
    everyone = 32 * m.warps_per_cta

    def run(f):
        if not m.complete(f):  # the count goes up by whole warps (manual, barrier)
            return PARK
        lead = f.lanes[np.searchsorted(f.lanes, f.warps * 32)]
        ids = barrier[lead].astype(np.int64)
        if (ids > 15).any():
            raise ProtocolError(f"barrier {int(ids.max())}: there are 16 barriers, 0 to 15")
        want = threads[lead].astype(np.int64) if threads is not None else np.full(len(lead), everyone)
        if (want % 32 != 0).any() or (want == 0).any():
            raise ProtocolError(f"barrier thread count {int(want[0])} is not a positive multiple of the warp size")
        if m.watch:
            m.watch.barrier(m, f, ins, action, ids, want)
        return m_arrive(m, f, ids, want, action == "sync")

    return run


def m_arrive(m, f, ids, want, sync):
    """Count the fragment's warps in; returns None when nobody has to wait, else a Wait."""
    ctas = m.cta_of_warp[f.warps]
    keys = ctas * 16 + ids
    count, gen, expected = (a.reshape(-1) for a in (m.barrier_count, m.barrier_generation, m.barrier_expected))
    unique, first, arrivals = np.unique(keys, return_index=True, return_counts=True)
    waits_for = gen[keys] + 1
    for k, n, w in zip(unique, arrivals, want[first]):
        if count[k] and expected[k] != w:
            raise ProtocolError(f"barrier {k % 16}: this warp expects {w} threads, earlier ones {expected[k]}")
        expected[k] = w
        count[k] += 32 * n
        if count[k] > w:
            raise ProtocolError(f"barrier {k % 16}: {count[k]} threads arrived, {w} expected")
        if count[k] == w:
            count[k], gen[k] = 0, gen[k] + 1
            m.events += 1
            if m.watch:
                m.watch.barrier_complete(m, int(k) // 16, int(k) % 16)
    if not sync or (gen[keys] >= waits_for).all():
        return None
    key_of_warp = dict(zip(f.warps.tolist(), zip(keys.tolist(), waits_for.tolist())))

    def ready(g):
        if len(unique) == 1:
            k = int(unique[0])
            return bool(gen[k] >= waits_for[0])
        done = {w: gen[k] >= n for w, (k, n) in key_of_warp.items()}
        return np.array([done[w] for w in (g.lanes >> 5).tolist()], bool)

    def describe(g):
        k, _ = key_of_warp[int(g.warps[0])]
        return f"barrier {k % 16} ({count[k]} of {expected[k]} threads have arrived)"

    return Wait(ready, describe)


@handler("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync")
def bar_sync(m, ins, mods):
    """Parallel Synchronization and Communication: bar{rier}{.cta}.sync."""
    return _barrier(m, ins, mods, "sync")


@handler("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive")
def bar_arrive(m, ins, mods):
    """Parallel Synchronization and Communication: bar{rier}{.cta}.arrive: does not wait."""
    return _barrier(m, ins, mods, "arrive")


@handler("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red")
def bar_red(m, ins, mods):
    """Parallel Synchronization and Communication: bar{rier}{.cta}.red."""
    return _barrier(m, ins, mods, "red")


def mask_operand(m, ins, op):
    """Array [lanes] of a membermask operand."""
    return m.read(ins, op, "b32")


def gather_members(m, f, mask):
    """PARK if a live lane named in its own membermask has not arrived, else None."""
    if f.whole:
        return None
    here = np.bincount(f.lanes >> 5, weights=1 << (f.lanes & 31), minlength=len(m.cta_of_warp)).astype(np.int64)
    live = (m.live.reshape(-1, 32) << np.arange(32)).sum(1)
    w = f.lanes >> 5
    need = mask[f.sel].astype(np.int64) & live[w]
    if (need & ~here[w]).any():
        return PARK
    if (~mask[f.sel].astype(np.int64) >> (f.lanes & 31) & 1).any():
        raise ProtocolError("a lane executes a .sync instruction whose membermask does not name it")
    return None


@handler("bar.warp.sync")
def bar_warp_sync(m, ins, mods):
    """Parallel Synchronization and Communication: bar.warp.sync."""
    mods.done()
    mask = mask_operand(m, ins, ins.operands[0])

    def run(f):
        r = gather_members(m, f, mask)
        if r is None and m.watch:
            m.watch.warp_sync(m, f, ins)
        return r

    return run


@handler("barrier.cluster.arrive", "barrier.cluster.wait")
def barrier_cluster(m, ins, mods):
    """Parallel Synchronization and Communication: barrier.cluster: only clusters of one CTA, where it orders the
    CTA's own threads: a CTA barrier of its own."""
    mods.one(("release", "relaxed", "acquire"))
    aligned = mods.flag("aligned")
    mods.done()
    if m.cluster != (1, 1, 1):
        raise unsupported(ins, "clusters larger than one CTA")
    state = m.units
    arrive = ins.parts[2] == "arrive"

    def run(f):
        if aligned and not m.complete(f):
            return PARK
        count = state.setdefault("cluster_count", np.zeros(m.batch, np.int64))
        gen = state.setdefault("cluster_gen", np.zeros(m.batch, np.int64))
        mine = state.setdefault("cluster_mine", np.zeros(m.lanes, np.int64))
        cta = m.cta_of_lane[f.lanes]
        if arrive:
            mine[f.sel] = gen[cta] + 1
            np.add.at(count, cta, 1)
            done = count == m.threads
            gen[done] += 1
            count[done] = 0
            m.events += 1
            return None
        ok = lambda g: gen[m.cta_of_lane[g.lanes]] >= mine[g.sel]  # noqa: E731
        if ok(f).all():
            return None
        return Wait(ok, lambda g: "the cluster barrier")

    return run


@handler("setmaxnreg")
def setmaxnreg(m, ins, mods):
    """Miscellaneous: setmaxnreg: register budget only; checked for the manual's range and multiple."""
    mods.need(("inc", "dec"), "setmaxnreg")
    mods.flag("sync"), mods.flag("aligned")
    kind = mods.type()
    mods.done()
    count = ins.operands[0].value if isinstance(ins.operands[0], ptx.Imm) else None
    if kind != "u32" or count is None or not 24 <= count <= 256 or count % 8:
        raise unsupported(ins, "setmaxnreg needs an immediate in 24..256, a multiple of 8")
    return lambda f: None if m.complete(f) else PARK


@handler("griddepcontrol")
def griddepcontrol(m, ins, mods):
    """Parallel Synchronization and Communication: griddepcontrol: launches run one after another here, so both forms
    return at once."""
    mods.need(("launch_dependents", "wait"), "griddepcontrol")
    mods.done()
    return lambda f: None


@handler("fence", "membar")
def fence(m, ins, mods):
    """Parallel Synchronization and Communication: membar / fence: memory is sequentially consistent here; watchers
    are told, to judge what it orders."""
    what = tuple(mods.left)
    known = {
        "sc",
        "acq_rel",
        "acquire",
        "release",
        "cta",
        "cluster",
        "gpu",
        "sys",
        "gl",
        "proxy",
        "async",
        "alias",
        "async::generic",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
        "async.shared::cta",
        "shared::cta",
        "shared::cluster",
        "global",
        "mbarrier_init",
        "tensormap::generic",
    }
    for w in what:
        if w not in known:
            raise unsupported(ins, f"fence modifier .{w}")

    def run(f):
        if m.watch:
            m.watch.fence(m, f, ins, what)

    return run
