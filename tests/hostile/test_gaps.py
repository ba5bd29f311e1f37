"""What is not refused in one clear line yet. Each is a strict xfail: mending it turns the test red until it is moved to
ladder/checks/malformed.py."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import hostile
from kernels.kda.contract import ContractError, Unsupported
from ladder import loader


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
