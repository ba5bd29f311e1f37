"""Rung 013, executed from its PTX on the CPU: who works is decided on the device, and either answer is right."""

import math
from types import SimpleNamespace

import pytest
import torch

from _common.cute import compile_unit
from _common.resources import resources
from emulator.launch import Device, decode
from emulator.memwatch import MemoryWatch
from emulator.mutants import enumerate_removals
from emulator.races import Races
from emulator.watch import Together
from kernels.kda import budget, oracle
from ladder import loader
from tests.helped import IDEAS, Faulty, drawn, guarded, run, slow
from tests.helped import rung as helped_rung

ARCHS = "sm_90a", "sm_100a"
NAME, OPEN = "013-even-cuts", 4  # what walks holds where three chunks are not enough


class Watched:
    """The rung on a GPU of so many SMs, with even shares of 4 chunks and more, and what its kernels told each other."""

    def __init__(self, monkeypatch, sms: int, *shares: tuple, arch: str = "sm_90a"):
        self.rung, self.arch = helped_rung(NAME, monkeypatch, sms, *shares), arch
        self.told = []
        module, either = self.rung.module, self.rung.module.either
        monkeypatch.setattr(module, "EVEN", (0, 0, 4))

        def watched(*kernels):
            launch = either(*kernels)

            def launched(*operands):
                launch(*operands)
                walks, dropped, least = operands[11][: 3 * sms].reshape(3, sms).tolist()
                self.told.append((walks, [int(d >= 0x7F80 or d > l + (14 << 7)) for d, l in zip(dropped, least[1:])]))

            return launched

        monkeypatch.setattr(module, "either", watched)

    def __call__(self, call: dict, **options):
        return run(self.rung, call, self.arch, **options)


def by_rows(monkeypatch, sms: int, call: dict, *shares: tuple, arch: str = "sm_90a"):
    """What rung 010's kernel alone gives."""
    rung = helped_rung(NAME, monkeypatch, sms, *shares)
    with monkeypatch.context() as patch:
        patch.setattr(rung.module, "even", lambda p: 0)
        return run(rung, call, arch)


def passes(call: dict, out) -> bool:
    return all(v.passed for v in budget.judge(*out, budget.reference(oracle.chunked(**call), **call)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("T, B, HV, K, V, form, sms, inside", [
    (1500, 1, 2, 64, 64, "prod", 3, [0, 1, 1]),  # 48 chunks by three: one cut in either row
    (512, 1, 3, 64, 64, "pre", 6, [0, 1, 0, 1, 0, 1]),  # every other cut where a row begins
    slow(640, 2, 2, 64, 64, "prod", 5, [0, 1, 1, 1, 1]),  # 40 chunks by five, over batches
    slow(1100, 1, 1, 64, 64, "pre", 4, [0, 1, 1, 1]),  # 18 chunks by four: shares of 5 and 4
    slow(700, 1, 1, 128, 128, "prod", 2, [0, 1]),
    slow(700, 1, 1, 128, 128, "pre", 2, [0, 1]),
    slow(520, 1, 1, 128, 256, "prod", 4, [0, 1, 1, 1]),  # two strips a row, of nine chunks
])  # fmt: skip
def test_strong_gates_close_every_cut(monkeypatch, arch, T, B, HV, K, V, form, sms, inside):
    call, rung = drawn(T, HV, K, "strong", form, B, V), Watched(monkeypatch, sms, arch=arch)
    out = rung(call)
    ((walks, seen),) = rung.told
    assert [min(walk, 1) for walk in walks] == inside and max(walks) < OPEN and not any(seen)
    assert passes(call, out)
    for ours, rows in zip(out, by_rows(monkeypatch, sms, call, arch=arch)):
        assert (ours - rows).abs().max() <= 2.0**-8 * rows.abs().max()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("regime, form, helped", [
    ("slow", "prod", ()), ("mixed", "pre", ((0, 64, 0, 1, 1),)), slow("slow", "pre", ((0, 64, 1, 2, 0),)),
])  # fmt: skip
def test_open_cuts_leave_the_work_to_rows(monkeypatch, arch, regime, form, helped):
    call, rung = drawn(600, 1, 64, regime, form), Watched(monkeypatch, 2, *helped, arch=arch)
    out = rung(call)
    assert [walks for walks, _ in rung.told] == [[0, OPEN]]
    assert all(map(torch.equal, out, by_rows(monkeypatch, 2, call, *helped, arch=arch))) and passes(call, out)


def larger(call: dict) -> None:
    """Values before the walk of the second share, from token 192 on, are 2^80 times those after it."""
    call["v"][:, :192] *= 2.0**80


def lone(call: dict) -> None:
    """One channel is written only before that walk and alone never fades after the cut, at token 320; nothing is written then."""
    call["k"][:, 192:, :, 0] = 0
    call["beta"][:, 320:] = 0
    call["g"][:, 320:] = -5
    call["g"][:, 320:, :, 0] = 0


def shares_alone(cuts, shares, rows):
    """In place of `either`."""

    def launch(*x):
        cuts(x[1], *x[3:7], *x[11:13], x[-1])
        shares(*x)

    return launch


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("change", [larger, lone])
def test_a_dropped_state_that_would_be_seen(monkeypatch, arch, change):
    """The gates close the cut, yet what is dropped matters: the CTAs tell enough for 010's kernel to do everything."""
    call, rung = drawn(600, 1, 64, "strong", "pre"), Watched(monkeypatch, 2, arch=arch)
    call["g"].fill_(-0.35)  # in all channels: the bound is what happens
    change(call)
    out = rung(call)
    assert rung.told == [([0, 2], [1])]
    assert all(map(torch.equal, out, by_rows(monkeypatch, 2, call, arch=arch))) and passes(call, out)

    monkeypatch.setattr(rung.rung.module, "either", shares_alone)
    monkeypatch.setattr(rung.rung.module, "CALLS", type(rung.rung.module.CALLS)())
    alone = rung(call)
    seen = (x[0][0, 320] if change is larger else x[1][0, 0, 0] for x in (out, alone))  # the first row of o after the cut; the channel
    right, wrong = (x.float() for x in seen)
    assert (wrong - right).norm() > 0.5 * right.norm() > 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("token", [3, 330])
def test_a_nan_stays(monkeypatch, arch, token):
    """As in a walk of rows: from its chunk to the end, whichever share it is in."""
    call, rung = drawn(600, 1, 64, "strong", "prod"), Watched(monkeypatch, 2, arch=arch)
    call["v"][0, token] = math.nan
    o, state = rung(call)
    bad = o.isnan().flatten(2).any(2)[0]
    assert not bad[: token // 64 * 64].any() and bad[token // 64 * 64 + 64 :].all() and state.isnan().any()


def test_walks_are_those_of_the_fades(monkeypatch):
    """Beside fades in fp64, with gates such that cuts close after one, two or three chunks, or not."""
    call, rung = drawn(8 * 64, 2, 64, "strong", "pre"), Watched(monkeypatch, 4)
    gates, seen = call["g"], set()
    for scale in (2.0, 1.0, 0.6, 0.3):
        call["g"] = (gates * scale).clamp(min=-5)
        rung(call)
        walks, _ = rung.told[-1]
        peaks = call["g"].double().amax(-1)[0] / math.log(2)  # [T, HV]
        expected = []
        for share in range(4):
            row, c = divmod(share * 4, 8)
            fades = [float(peaks[64 * (c - n) : 64 * c, row].sum()) for n in range(1, min(c, 3) + 1)]
            closed = [n for n, fade in enumerate(fades, 1) if fade <= -40]
            expected.append(closed[0] if closed else c if c <= 3 else OPEN)
        assert walks == expected
        seen |= set(walks)
    assert seen == {0, 1, 2, 3, OPEN}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["prod", pytest.param("pre", marks=pytest.mark.slow)])
def test_any_order_gives_the_same_bits_and_no_finding(monkeypatch, arch, form):
    call, rung = drawn(520, 1, 64, "strong", form), Watched(monkeypatch, 2, arch=arch)
    expected, memory = rung(call), MemoryWatch()
    device = Device(arch, 3, Together(Races(), memory))
    out = guarded(rung.rung, call, device, memory)
    assert not device.watch.report() and all(map(torch.equal, expected, out))
    assert [seen for _, seen in rung.told] == [[0]] * 2 and max(rung.told[0][0]) < OPEN


@pytest.mark.parametrize("arch", ARCHS)
def test_the_barriers_between_warps_are_asked_for(monkeypatch, arch):
    """Those of cuts.py and shares.py, one at a time."""
    call, rung = drawn(520, 1, 64, "strong", "prod"), Watched(monkeypatch, 2, arch=arch)
    clean = Faulty(arch, 3, Races())
    rung(call, device=clean)
    assert not clean.watch.report() and len(clean.texts) == 3
    mutants = [(text, mutant) for text in clean.texts[:2] for kernel in decode(text).kernels
               for mutant in enumerate_removals(text, kernel)
               if mutant.source and mutant.source[0].endswith(("cuts.py", "shares.py"))]  # fmt: skip
    assert len(mutants) == 2
    for text, mutant in mutants:
        device = Faulty(arch, 3, Races())
        device.faulty, device.mutant = text, mutant
        rung(call, device=device)
        assert device.watch.report(), mutant.name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", (NAME, "015-loads-first"))
def test_no_spills(name, arch):
    for unit in loader.load(IDEAS / name).module.UNITS:
        for row in resources(compile_unit(unit(arch)).cubin):
            assert row.registers <= (255 if row.kernel.startswith("kda_forward_cuts") else 168) and row.spilled == 0, unit


@pytest.mark.parametrize("rows, chunks, sms, V, expected", [
    (96, 128, 132, 128, 0), (64, 128, 132, 128, 132), (32, 512, 132, 128, 132), (24, 128, 132, 128, 132), (12, 32, 132, 128, 0),
    (128, 64, 132, 128, 0), (200, 128, 132, 128, 132), (256, 128, 132, 256, 0), (12, 2, 132, 128, 0),
])  # fmt: skip
def test_where_even_shares_pay(monkeypatch, rows, chunks, sms, V, expected):
    module = loader.load(IDEAS / NAME).module
    monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
    problem = SimpleNamespace(B=1, HV=rows, V=V, NT=chunks, device=torch.device("cpu"), safe_gate=True, io_dtype=torch.bfloat16,
                              dtypes={"g": torch.bfloat16})  # fmt: skip
    assert module.even(problem) == expected
    with_wide_gates = module.even(SimpleNamespace(**{**vars(problem), "dtypes": {"g": torch.float32}}))
    assert with_wide_gates == (132 if (rows, chunks) == (96, 128) else expected)
    assert module.even(SimpleNamespace(**{**vars(problem), "safe_gate": False})) == 0
