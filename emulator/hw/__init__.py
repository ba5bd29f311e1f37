"""Engine-independent models of the asynchronous units of sm_90a and sm_100a.

Every module is pure: it takes integers, bytes or numpy arrays and returns index arrays, decoded fields or results. None
of them owns memory or knows about warps, clocks or watches; the engine does the copying and the checking.

    tensormap    the 128-byte tiled tensor map                  tma          boxes, bulk copies, swizzles
    mbarrier     the barrier object as state                    numerics     tensor-core dot products
    matrix_desc  shared-memory matrix descriptors               wgmma        Hopper warpgroup MMA and its fragments
    tcgen05      Blackwell MMA, instruction descriptor          tmem         tensor memory: addresses, ld/st, allocator
"""

from .errors import HwError, HwUnsupported

__all__ = [
    "HwError",
    "HwUnsupported",
    "tensormap",
    "tma",
    "mbarrier",
    "numerics",
    "matrix_desc",
    "wgmma",
    "tcgen05",
    "tmem",
]
