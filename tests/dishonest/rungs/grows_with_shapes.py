"""Keeps a plan per shape, tensors and all, for ever."""

from .honest import STAGES, UNITS, unsupported  # noqa: F401
from .honest import chunk_kda as honest

from _common.cache import CallCache, Plan

CALLS = CallCache(limit=8)


def chunk_kda(**call):
    key = call["q"].shape, call["q"].dtype, tuple(sorted(call))
    CALLS._plans.setdefault(key, Plan(honest, ()))  # past the cache and its limit
    return honest(**call)
