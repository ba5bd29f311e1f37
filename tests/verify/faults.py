"""Protocol faults, planted in the PTX of rung 003's kernel. Each takes the text and returns it with one fault."""

import re


def _index(lines, needle, start=0, step=1):
    i = start
    while needle not in lines[i]:
        i += step
    return i


def missing_wait(ptx):
    """The recurrence group reads WH without waiting for it: the wait before the first tensor-memory load goes."""
    lines = ptx.split("\n")
    wait = _index(lines, "mbarrier.try_wait", _index(lines, "tcgen05.ld"), -1)
    first, last = _index(lines, "begin inline asm", wait, -1), _index(lines, "end inline asm", wait)
    return "\n".join(lines[:first] + lines[last + 1 :])


def dropped_arrive(ptx):
    """Nobody says that v' is in shared memory: the arrive after its first stores goes."""
    lines = ptx.split("\n")
    arrive = _index(lines, "mbarrier.arrive.shared", _index(lines, ".trans.shared"))
    return "\n".join(lines[:arrive] + lines[arrive + 1 :])


def wrong_byte_count(ptx):
    """The barrier of u and G expects u's bytes only: 8 KiB, the 512 of the decay row missing."""
    lines = ptx.split("\n")
    register = re.search(r", (%r\d+);", lines[_index(lines, "expect_tx", _index(lines, "expect_tx") + 1)])[1]
    assignment = re.compile(rf"(mov\.b32\s+{register}, )8704;")
    assert len(assignment.findall(ptx)) == 1
    return assignment.sub(r"\g<1>8192;", ptx)


def aliased_barriers(ptx):
    """Two neighbouring barriers in one place, as when an array is declared half as long as it is: VD_FULL, VO_FULL."""
    offsets = re.findall(r"mbarrier\.init\.shared\.b64\s+\[%r\d+\+(\d+)\]", ptx)
    assert len(offsets) == 16
    first, second = offsets[12], offsets[13]  # their indices in the kernel's Bar
    return re.sub(rf"\b{second}\b", first, ptx)


def missing_barrier(ptx):
    """The output tile is stored from shared memory before the epilogue group has written all of it."""
    lines = ptx.split("\n")
    barriers = [i for i, line in enumerate(lines) if re.search(r"bar\.sync\s+1, 128", line)]
    assert len(barriers) == 1
    return "\n".join(lines[: barriers[0]] + lines[barriers[0] + 1 :])


ALL = (missing_wait, dropped_arrive, wrong_byte_count, aliased_barriers, missing_barrier)


def synchronisation(ptx):
    """Every wait, arrive, commit and barrier of the text, as (name, first line, last line), 0-based."""
    lines, found = ptx.split("\n"), []
    kinds = ("mbarrier.try_wait", "mbarrier.arrive.shared", "tcgen05.commit", "bar.sync", "cp.async.bulk.wait_group")
    for kind in kinds:
        for number, i in enumerate(i for i, line in enumerate(lines) if kind in line):
            whole = "try_wait" in kind  # inside a block of inline assembly, with its loop
            first = _index(lines, "begin inline asm", i, -1) if whole else i
            found.append((f"{kind} {number}", first, _index(lines, "end inline asm", i) if whole else i))
    return found
