"""What tests of rungs with helpers (009 and later) share: the rung on a GPU of so many SMs, and a call of it in the emulator."""

from pathlib import Path

import pytest
import torch

from _common import target as targets
from emulator import EmulatedTarget
from emulator.launch import Device
from kernels.kda import inputs
from kernels.kda.cases import Case
from ladder import loader

IDEAS = Path(__file__).resolve().parents[1] / "ideas"


def slow(*case):
    """A case that is not in the default run."""
    return pytest.param(*case, marks=pytest.mark.slow)


def rung(name: str, monkeypatch, sms: int, *shares: tuple):
    """The rung ideas/`name`; shares: its SHARES, as its kernel.py has them."""
    rung = loader.load(IDEAS / name)
    monkeypatch.setattr(rung.module, "multiprocessors", lambda device: sms)
    monkeypatch.setattr(rung.module, "SHARES", shares)
    monkeypatch.setattr(rung.module, "CALLS", type(rung.module.CALLS)())
    return rung


def drawn(T: int, HV: int, K: int, regime: str, form: str, B: int = 1, V: int | None = None) -> dict:
    return inputs.make(Case("drawn", B, T, 1, HV, K, V or K, initial_state=True), regime, form, 7).call()


def run(rung, call: dict, arch: str = "sm_90a", **options):
    """(o, final state). options: of EmulatedTarget."""
    with targets.use(EmulatedTarget(arch, **options)):
        return rung.chunk_kda(**call)


def guarded(rung, call: dict, device: Device, memory):
    """(o, final state) on a device that `memory`, a MemoryWatch, watches: no input may be written, nothing unwritten read."""
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            memory.protect(value, name)
    with memory.following(0x3C):
        return run(rung, call, device.arch, device=device)


class Faulty(Device):
    """A device on which a kernel lacks something: `mutant` of it, of every one unless `faulty` is its text. texts: what was
    launched."""

    mutant = faulty = None

    def __init__(self, *rest):
        super().__init__(*rest)
        self.texts = []

    def launch(self, text, *rest, **named):
        self.texts.append(text)
        hit = self.mutant and self.faulty in (None, text)
        return super().launch(self.mutant.apply(text) if hit else text, *rest, **named)
