"""Memory spaces. Global memory is the process's own memory behind registered allocations; every access is checked.

Addresses (PTX ISA, "State Spaces"): shared and local variables live in windows of the generic address space, so that
generic addresses and 32-bit shared addresses can both be used. Window bases are chosen outside any host mapping.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from .errors import MemoryFault

SHARED_WINDOW = 1 << 56  # generic address of shared::cta offset 0
LOCAL_WINDOW = 1 << 57
PARAM_WINDOW = 1 << 58
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Buffer:
    """Bytes with typed views; `origin` is the address of byte 0, aligned to 16."""

    def __init__(self, data, origin, low, high, name, writable=True):
        self.data, self.origin, self.low, self.high = data, origin, low, high
        self.name, self.writable = name, writable
        self.views = {n: data[: len(data) // n * n].view(t) for n, t in UINT.items()}

    def view(self, unit):
        """The bytes as unsigned integers of `unit` bytes."""
        return self.views[unit]


class GlobalMemory:
    """Table of allocations that device code may touch. Overlapping registrations are merged."""

    def __init__(self):
        self.buffers, self.lows, self.keep = [], [], []

    def register(self, address, nbytes, name, writable=True, keep=None):
        """Allow accesses to [address, address + nbytes). `keep` is held so that the memory stays alive."""
        if nbytes <= 0:
            return
        low, high, names = address, address + nbytes, [name]
        for b in [b for b in self.buffers if b.low < high and low < b.high]:
            low, high = min(low, b.low), max(high, b.high)
            writable = writable or b.writable
            names.insert(0, b.name)
            i = self.buffers.index(b)
            del self.buffers[i], self.lows[i]
        origin = low & ~15
        size = high - origin
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(origin))
        i = bisect.bisect(self.lows, low)
        self.lows.insert(i, low)
        self.buffers.insert(i, Buffer(raw, origin, low, high, "/".join(dict.fromkeys(names)), writable))
        self.keep.append(keep)

    def add(self, value, name=None, writable=True):
        """Register the memory of a torch tensor or numpy array and return its address."""
        if isinstance(value, np.ndarray):
            span = value.nbytes if value.flags.c_contiguous else _span(value.shape, value.strides, value.itemsize)
            address = value.ctypes.data
        else:
            es = value.element_size()
            span = _span(value.shape, [s * es for s in value.stride()], es)
            address = value.data_ptr()
        self.register(address, span, name or f"allocation {len(self.buffers)}", writable, value)
        return address

    def find(self, low, high):
        """The buffer holding [low, high), or None."""
        i = bisect.bisect(self.lows, low) - 1
        if i >= 0 and high <= self.buffers[i].high:
            return self.buffers[i]
        return None

    def describe(self, address):
        i = bisect.bisect(self.lows, address) - 1
        near = []
        if i >= 0:
            near.append(f"{address - self.buffers[i].high} bytes past the end of {self.buffers[i].name}")
        if i + 1 < len(self.buffers):
            near.append(f"{self.buffers[i + 1].low - address} bytes before {self.buffers[i + 1].name}")
        return "; ".join(near) or "no allocation is registered"

    def groups(self, address, size, write):
        """Yield (buffer, index array or slice) covering all lanes; raises MemoryFault for a lane outside them all."""
        low, high = int(address.min()), int(address.max()) + size
        b = self.find(low, high)
        if b is not None:
            self._writable(b, write)
            yield b, slice(None)
            return
        which = np.searchsorted(np.array(self.lows, np.uint64), address, "right") - 1
        for i in np.unique(which):
            lanes = np.nonzero(which == i)[0]
            ends = address[lanes] + np.uint64(size)
            bad = lanes if i < 0 else lanes[ends > self.buffers[i].high]
            if len(bad):
                a = int(address[bad[0]])
                raise MemoryFault(
                    f"global {'write' if write else 'read'} of {size} bytes at 0x{a:x} is out of bounds: "
                    f"{self.describe(a)}"
                )
            self._writable(self.buffers[i], write)
            yield self.buffers[i], lanes

    def _writable(self, b, write):
        if write and not b.writable:
            raise MemoryFault(f"write to {b.name}, which is an input")


def _span(shape, strides, itemsize):
    if any(n == 0 for n in shape):
        return 0
    return itemsize + sum((n - 1) * s for n, s in zip(shape, strides))


def align_check(address, size, what):
    """Natural alignment (PTX ISA, "Addresses as Operands": addresses must be aligned to the access size)."""
    if size > 1 and (address & address.dtype.type(size - 1)).any():
        a = int(address[(address & address.dtype.type(size - 1)) != 0][0])
        raise MemoryFault(f"misaligned {what}: address 0x{a:x} is not a multiple of {size}")


def gather(view, index, count):
    """[lanes, count] elements of `view` starting at `index`."""
    if count == 1:
        return view[index][:, None]
    return view[index[:, None] + np.arange(count)]


class WindowMemory:
    """One byte array holding the same space of every CTA (shared) or lane (local) of a batch, `stride` bytes apart."""

    def __init__(self, name, copies, size):
        self.name, self.size = name, size
        self.stride = -(-size // 1024) * 1024
        self.buffer = Buffer(np.zeros(copies * self.stride, np.uint8), 0, 0, copies * self.stride, name)

    @property
    def data(self):
        return self.buffer.data

    def locate(self, offset, copy, size, write):
        """Flat byte positions (int64) of `offset` (unsigned array) within copies `copy`; checks bounds."""
        off = offset.astype(np.int64)
        if off.size and (int(off.max()) + size > self.size or int(off.min()) < 0):
            a = int(off[(off + size > self.size) | (off < 0)][0])
            raise MemoryFault(
                f"{self.name} {'write' if write else 'read'} of {size} bytes at 0x{a:x} is out of bounds: "
                f"the CTA has {self.size} bytes"
            )
        return off + copy * self.stride
