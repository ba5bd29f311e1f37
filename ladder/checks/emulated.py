"""What the emulator's watchers find while a rung runs: races, missing fences, unwritten memory, writes into inputs."""

from __future__ import annotations

import torch

from ladder.cells import seed_for
from ladder.checks.context import Context, Failure, NotRun, Outputs, first_difference

POISON = (0xFF, 0x3C, 0x00)  # what empty memory holds: NaN, then numbers; one schedule each, the first without a seed
FLA = ", source fla/"  # a place in fla's own kernels


def no_findings(ctx: Context) -> str | None:
    """A call under the emulator's default schedule and two seeded interleavings: nothing is found, and all three answer
    with the same bits. Returns what the rung has from fla and from the compiler, in words."""
    if ctx.kind != "emulated":
        raise NotRun("watched in the emulator only, with --device cpu on a machine that has a GPU")
    inputs = ctx.draw("watched")
    ctx.supported(inputs)
    launched, inherited, first = len(ctx.emulator.stats), [], None
    for n, poison in enumerate(POISON):
        seed = seed_for(ctx.seed, "interleaving", n) if n else None
        outputs, found = watched(ctx, inputs, seed, poison)
        own = [text for text in found if FLA not in text.partition(";")[0]]
        if own:
            raise Failure(_told(own, seed))
        inherited += found
        first = first or outputs
        if n and (difference := _difference(outputs, first)):
            raise Failure(_blame(ctx, inputs, first, seed, difference, inherited))
    return "; ".join(_from_fla(inherited) + _from_compiler(ctx.emulator.stats[launched:])) or None


def watched(ctx: Context, inputs, seed: int | None, poison: int) -> tuple[Outputs, list[str]]:
    """Outputs and findings of one call. Raises Failure for what stops the emulator (a deadlock, an access outside)."""
    from emulator import EmulatorError
    from emulator.memwatch import MemoryWatch
    from emulator.races import Races
    from emulator.watch import Together

    device, memory = ctx.emulator, MemoryWatch()
    before = device.seed, device.watch
    device.seed, device.watch = seed, Together(Races(), memory)
    call = inputs.call()
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            memory.protect(value, name)
    try:
        with memory.following(poison):
            outputs = ctx.call(inputs)
        return outputs, device.watch.report()
    except EmulatorError as error:
        raise Failure(_told([*device.watch.report(), f"{type(error).__name__}: {error}"], seed)) from None
    finally:
        device.seed, device.watch = before


def _told(found: list[str], seed: int | None) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}, {_schedule(seed)}"


def _schedule(seed: int | None) -> str:
    return "default schedule" if seed is None else f"interleaving {seed}"


def _difference(now: Outputs, before: Outputs) -> str:
    for name, a, b in zip(("o", "final_state"), now, before):
        if a is not None and (difference := first_difference(a, b)):
            return f"{name}: {difference}"
    return ""


def _blame(ctx: Context, inputs, first: Outputs, seed: int, difference: str, unwritten: list[str]) -> str:
    """Whether the order of the warps or the contents of empty memory made the outputs differ."""
    if _difference(watched(ctx, inputs, seed, POISON[0])[0], first):
        return f"the answer depends on the order in which warps run: {difference}, interleaving {seed} against the default schedule"
    return f"the answer depends on memory that nobody wrote: {difference}" + "".join(f"; {text}" for text in unwritten[:1])


def _from_fla(found: list[str]) -> list[str]:
    """Findings in fla's kernels, which leave the outputs as they are: counted, the first in full."""
    lines = list(dict.fromkeys("fla/" + text.rpartition(FLA)[2].rstrip("]") for text in found))
    return [f"inherited from fla, without effect on the outputs: {found[0].partition(':')[0]} at {', '.join(lines)}"] if found else []


def _from_compiler(launches: list[dict]) -> list[str]:
    early = {launch["kernel"]: launch["early_uses"] for launch in launches if launch["early_uses"]}
    return [f"inherited from the compiler: {kernel} uses results of tcgen05.ld before their wait, PTX lines "
            f"{', '.join(map(str, lines[:4]))}{', ...' if len(lines) > 4 else ''}" for kernel, lines in early.items()]  # fmt: skip
