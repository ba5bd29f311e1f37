"""What is not refused in one clear line yet. Each is a strict xfail: mending it turns the test red until it is moved to
ladder/checks/malformed.py (the first three) or is left to the families of `check` (the last)."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import hostile
from kernels.kda.contract import ContractError, Unsupported
from ladder import loader
from tests.hostile.test_emulated import check


@pytest.fixture
def chunk_kda(forge):
    forge.rung("right")
    ladder = forge.ladder()
    return loader.load(ladder.folder(ladder.rung(1))).chunk_kda


@pytest.mark.xfail(strict=True, reason="kernels/kda/contract.py: bind takes tensors of any one device, meta included")
def test_every_tensor_on_meta(chunk_kda):
    call = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in hostile.make("form=prod", 1).call().items()}
    with pytest.raises((ContractError, Unsupported), match="^q: "):
        chunk_kda(**call)


@pytest.mark.xfail(strict=True, reason="kernels/kda/contract.py: bind takes sparse tensors, whose strides mean nothing")
def test_a_sparse_tensor(chunk_kda):
    call = hostile.make("T=4", 1).call()
    with pytest.raises((ContractError, Unsupported), match="^k: "):
        chunk_kda(**{**call, "k": call["k"].to_sparse()})


@pytest.mark.xfail(strict=True, reason="kernels/kda/contract.py: a scale that is no number is not refused by name")
def test_a_scale_that_is_no_number(chunk_kda):
    with pytest.raises((ContractError, Unsupported), match="^scale: "):
        chunk_kda(**hostile.make("T=4", 1).call(), scale="large")


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="ideas/00[234]: an initial_state one element past an aligned address reaches the "
                                       "state kernel, whose launcher raises; it must be copied, as a strided one is")  # fmt: skip
@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_initial_state_off_alignment(number):
    (row,) = check(number, "sm_90a", "--hostile", "T=1 state=random layout=offset")
    assert row["outcome"] == "passed", row["reason"]
