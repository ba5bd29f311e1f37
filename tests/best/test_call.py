"""`from ladder import chunk_kda`: which rung runs, what is said, what is refused, and what the choice costs."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
import time
import timeit
from functools import partial
from pathlib import Path

import pytest
import torch

from _common import target
from kernels.kda import contract, inputs
from kernels.kda.cases import Case
from kernels.kda.contract import ContractError
from ladder import loader
from ladder.dispatch import dispatcher
from tests.best.conftest import SHAPE

PROJECT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
BOTH = (("tiny", "strong", "prod"), ("tiny", "slow", "prod"))


class Cpu:
    """Stands where the emulated target stands; rungs of plain torch ask nothing of it but its name."""

    arch = "cpu"


@pytest.fixture(autouse=True)
def here(caplog):
    caplog.set_level(logging.INFO, logger="kda_ladder")
    with target.use(Cpu()), torch.no_grad():
        yield


def drawn(regime="slow", form="prod", seed=3, **changes):
    return inputs.make(Case("drawn", **(SHAPE | {"H": 1} | changes)), regime, form, seed).call()


def ran(rungs, chunk_kda, call) -> int:
    """The number of the rung that ran: it is what its o has too much."""
    o, _ = chunk_kda(**call)
    plain = loader.load(rungs.root / "ideas" / "001-rung-1").chunk_kda(**call)[0].float() - 1
    return round((o.float() - plain).mean().item())


def test_import_is_lazy():
    code = """
import sys, ladder
heavy = {"torch", "triton", "fla", "cutlass", "scipy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from ladder import chunk_kda
assert not {"triton", "fla", "cutlass", "scipy"} & set(sys.modules)
assert "lower_bound" in chunk_kda.__code__.co_varnames and "Which kernel runs" in chunk_kda.__doc__
try:
    ladder.nonsense
except AttributeError as error:
    assert str(error) == "module 'ladder' has no attribute 'nonsense'"
"""
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True)


def test_help_does_not_import_torch():
    code = """
import sys
sys.argv = ["ladder", "--help"]
try:
    from ladder.cli import main
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0 and "best" in done.stdout, done.stderr


def test_the_fastest_by_the_records_runs_and_is_named_once(rungs, caplog):
    for _ in range(3):
        rungs.add()
    for number, ms in ((1, 3.0), (2, 1.0), (3, 2.0)):
        rungs.time(number, dict.fromkeys(BOTH, ms))
    chunk_kda = dispatcher(rungs.root)
    assert caplog.messages == []
    assert [ran(rungs, chunk_kda, drawn(seed=s)) for s in (3, 4)] == [2, 2]
    assert caplog.messages == [
        "chunk_kda: rung 002-rung-2 for B=1 T=128 H=1 HV=2 K=32 V=32 bfloat16, gate safe, on an emulated cpu: 1 ms (strong and "
        "slow, prod) at tiny on NVIDIA H200, the nearest measured case, the least of 3 rungs timed there"]  # fmt: skip
    ran(rungs, chunk_kda, drawn(T=64))
    assert len(caplog.messages) == 2 and "T=64" in caplog.messages[1]


def test_the_answer_is_the_rungs_own(rungs):
    rungs.add()
    call = drawn("init", "pre")
    got, own = dispatcher(rungs.root)(**call), loader.load(rungs.root / "ideas" / "001-rung-1").chunk_kda(**call)
    assert all(torch.equal(a, b) for a, b in zip(got, own))
    assert dispatcher(rungs.root)(**(call | {"output_final_state": False}))[1] is None


def test_the_call_follows_the_nearest_case(rungs):
    rungs.add()
    rungs.add()
    long = {("long", r, "prod"): 1.0 for r in ("strong", "slow")}
    for number, tiny, other in ((1, 1.0, 2.0), (2, 2.0, 1.0)):
        rungs.time(number, dict.fromkeys(BOTH, tiny) | dict.fromkeys(long, other), shapes={"long": {"T": 1024}})
    chunk_kda = dispatcher(rungs.root)
    assert ran(rungs, chunk_kda, drawn()) == 1 and ran(rungs, chunk_kda, drawn(T=512)) == 2


def test_without_a_current_record_the_highest_number_runs(rungs, caplog):
    rungs.add()
    rungs.time(1, dict.fromkeys(BOTH, 1.0))
    rungs.add("won")
    kernel = rungs.root / "ideas" / "001-rung-1" / "kernel.py"
    kernel.write_text(kernel.read_text() + "# its record is stale now\n")
    assert ran(rungs, dispatcher(rungs.root), drawn()) == 2
    assert "the highest-numbered rung that takes it; none has a current time" in caplog.messages[0]


def test_drafts_falsified_and_failing_rungs_do_not_run(rungs):
    rungs.add()
    for status in ("draft", "falsified", "won"):
        rungs.add(status)
    path = rungs.root / "ladder.yaml"
    path.write_text(path.read_text().replace("status: falsified", "status: falsified\n  reason: slower"))
    for number in (1, 2, 3, 4):
        rungs.time(number, dict.fromkeys(BOTH, 10.0 / number))
    assert ran(rungs, dispatcher(rungs.root), drawn()) == 4
    rungs.fail(4)
    assert ran(rungs, dispatcher(rungs.root), drawn()) == 1


def test_rungs_for_other_devices_that_decline_or_are_broken_do_not_run(rungs, caplog):
    rungs.add()
    rungs.add("won", ("    return None\n", '    return "v: given V = 32" if p.V == 32 else None\n'))
    rungs.add("won", ("UNITS = ()", "UNITS = () / 0"))
    rungs.add("won", arch="sm_90a")
    chunk_kda = dispatcher(rungs.root)
    assert ran(rungs, chunk_kda, drawn()) == 1 and ran(rungs, chunk_kda, drawn(V=16)) == 2


def test_strides_and_alignment_can_change_the_choice(rungs):
    """What a rung declines by its layout goes to another one, though shape and dtype are those of an earlier call."""
    rungs.add()
    rungs.add("won", ("    return None\n", '    return f"{min(p.loose)}: accepted: dense" if p.loose else None\n'))
    chunk_kda, call = dispatcher(rungs.root), drawn("init", H=2, initial_state=True)
    assert ran(rungs, chunk_kda, call) == 2
    for name in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"):
        t = call[name]
        turned = t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 2 else torch.stack([t, t], -1)[..., 0]
        shifted = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
        for loose in (turned, shifted):
            assert torch.equal(loose, t) and ran(rungs, chunk_kda, call | {name: loose}) == 1, name
    assert ran(rungs, chunk_kda, call) == 2


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: {"q": c["q"].tolist()}, "q: given list, accepted: a torch.Tensor"),
    (lambda c: {"v": c["v"][0]}, "v: given shape"),
    (lambda c: {"k": c["k"][:, :-1]}, "k: given shape"),
    (lambda c: {"scale": [1.0]}, "scale: given"),
    (lambda c: {"lower_bound": None}, "lower_bound: given None"),
    (lambda c: {"A_log": None, "dt_bias": None}, "A_log: given None"),
])  # fmt: skip
def test_a_malformed_call_is_refused_in_one_line(rungs, change, message):
    rungs.add()
    chunk_kda, call = dispatcher(rungs.root), drawn()
    chunk_kda(**call)
    for _ in range(2):
        with pytest.raises(ContractError, match=message) as error:
            chunk_kda(**(call | change(call)))
        assert "\n" not in str(error.value)


def test_without_a_gpu_it_refuses_and_names_the_device(rungs):
    rungs.add()
    message = r"^q: given on cpu, accepted: a CUDA device \(.*emulator\)$"
    with pytest.MonkeyPatch.context() as m, pytest.raises(ContractError, match=message):
        m.setattr(target, "_installed", [])
        dispatcher(rungs.root)(**drawn())


def test_choices_do_not_pile_up(rungs, monkeypatch):
    """As many as the contract remembers, none of them for a call that it has forgotten."""
    monkeypatch.setattr(contract, "_KEPT", 2)
    rungs.add()
    chunk_kda, others = dispatcher(rungs.root), alive()
    for T in range(16, 22):
        chunk_kda(**drawn(T=T))
    gc.collect()
    assert sorted(p.T for p in alive() if not any(p is other for other in others)) == [20, 21]


def alive() -> list[contract.Problem]:
    """In this process: other tests' too."""
    return [p for p in gc.get_objects() if type(p) is contract.Problem]


IDLE = """
from kernels.kda.contract import Stage, kda_op
UNITS = ()
STAGES = (Stage("none", (), lambda p, x: {"o": None, "final_state": None}),)
def unsupported(p):
    return None
chunk_kda = kda_op(STAGES, unsupported)
"""


def test_the_choice_costs_less_than_the_rungs_own_bookkeeping(rungs):
    """Host time of a call through the choice, against the rung's call itself, whose stage here does nothing."""
    rungs.add()
    (rungs.root / "ideas" / "001-rung-1" / "kernel.py").write_text(IDLE)
    chunk_kda, own, call = dispatcher(rungs.root), loader.load(rungs.root / "ideas" / "001-rung-1").chunk_kda, drawn()
    chunk_kda(**call)
    timers = {run: timeit.Timer(partial(run, **call), timer=time.thread_time) for run in (own, chunk_kda)}
    times = dict.fromkeys(timers, math.inf)
    for run in (own, chunk_kda) * 9:  # in turn: a machine that is slow for a while is slow for both
        times[run] = min(times[run], timers[run].timeit(500) / 500 * 1e6)
    added = times[chunk_kda] - times[own]
    print(f"the rung {times[own]:.1f} us, the choice {added:.1f} us more")
    assert added < 0.8 * times[own]


def test_on_the_emulator_over_the_real_ladder():
    """A real rung on executed PTX; fla for what no rung takes, with its own errors and its own backward."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("call_process.py")), "sm_90a"],
                          env=ENV, cwd=PROJECT, capture_output=True, text=True, timeout=500)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["equal"] and got["same_kernels"] and got["ours"]
    assert any("chunk_gla_fwd_kernel_o" in k for k in got["fla"]) and max(got["apart"]) < 0.02
    first, second, third, fourth = got["said"]
    assert "chunk_kda: rung 0" in first and "on an emulated sm_90a" in first
    shapes = "q (1, 64, 1, 64), v (1, 64, 1, 64)"
    assert second.startswith(f"chunk_kda: fla's chunk_kda for {shapes} on an emulated sm_90a: disable_recompute: ")
    assert "chunk_size" in third and "got 48" in got["errors"][0] and got["errors"][1] == got["errors"][0]
    assert got["errors"][2:] == ["chunk_dize: not a keyword of fla's chunk_kda; accepted: leave it out"]
    assert "v: given a tensor that requires grad" in fourth and got["backward"]
