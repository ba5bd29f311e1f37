"""The call cache: what makes two calls different, what it may hold, and that it stays bounded."""

import gc
import weakref

import pytest
import torch

from _common.cache import CallCache, Plan, Spec


def plan():
    return Plan(lambda *a: None, (Spec((2, 3), torch.float16),))


def make_counter():
    made = []
    return made, lambda: made.append(1) or plan()


BASE = torch.zeros(4, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(("other", "options", "same"), [
    (torch.ones(4, 8, dtype=torch.bfloat16), (1.0,), True),
    (torch.zeros(8, 4, dtype=torch.bfloat16), (1.0,), False),
    (torch.zeros(8, 4, dtype=torch.bfloat16).t(), (1.0,), False),
    (torch.zeros(4, 8, dtype=torch.float16), (1.0,), False),
    (torch.zeros(33, dtype=torch.bfloat16)[1:].view(4, 8), (1.0,), False),
    (torch.zeros(4, 8, dtype=torch.bfloat16, device="meta"), (1.0,), False),
    (None, (1.0,), False),
    (BASE, (2.0,), False),
], ids=["values", "shape", "strides", "dtype", "alignment", "device", "absent", "option"])  # fmt: skip
def test_what_makes_a_call_another_call(other, options, same):
    cache, (made, make) = CallCache(), make_counter()
    cache.plan((BASE,), (1.0,), make)
    cache.plan((other,), options, make)
    assert len(made) == (1 if same else 2)


def test_outputs_are_fresh_at_each_call():
    p = plan()
    (a,), (b,) = p.allocate(torch.device("cpu")), p.allocate(torch.device("cpu"))
    assert a.shape == (2, 3) and a.dtype == torch.float16 and a.data_ptr() != b.data_ptr()


def test_holds_no_tensor():
    cache = CallCache()
    t = torch.zeros(3)
    ref = weakref.ref(t)
    cache.plan((t,), (), plan)
    del t
    gc.collect()
    assert ref() is None


def test_bounded_dropping_the_least_recently_used():
    cache, (made, make) = CallCache(limit=3), make_counter()
    tensors = [torch.zeros(n + 1) for n in range(4)]
    for t in tensors[:3]:
        cache.plan((t,), (), make)
    cache.plan((tensors[0],), (), make)  # used again: now 1 is the oldest
    cache.plan((tensors[3],), (), make)
    assert len(cache) == 3 and len(made) == 4
    cache.plan((tensors[0],), (), make)
    assert len(made) == 4
    cache.plan((tensors[1],), (), make)
    assert len(made) == 5
