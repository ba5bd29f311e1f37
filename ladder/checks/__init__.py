"""The properties a rung must have, one function each. A property returns, or raises Failure or NotRun in words."""

from __future__ import annotations

from functools import partial

from kernels.kda.hostile import FAMILIES
from ladder.checks import emulated, honesty, hostile, malformed, memory, streams, values

# Order: cheap explanations of a failure before expensive ones.
ALL = {
    "emulated: no findings": emulated.no_findings,
    "every row written": values.every_row_written,
    "first output survives": memory.first_output_survives,
    "reused input memory": memory.reused_input_memory,
    "inputs untouched": values.inputs_untouched,
    "causality": values.causality,
    "two halves": values.two_halves,
    "reruns bitwise equal": values.reruns,
    "alternating shapes and dtypes": values.alternating,
    "second stream": streams.second_stream,
    "two streams at once": streams.two_streams,
    "second device": streams.second_device,
    "two threads at once": streams.two_threads,
    "CUDA graph": streams.graph,
    "memory flat": memory.memory_flat,
    "many shapes": memory.many_shapes,
    "refusals": honesty.refusals,
    "global state": honesty.global_state,
    "finished when returned": honesty.finished_when_returned,
    "own code": honesty.own_code,
    "patches nothing": honesty.patches_nothing,
    "kernels launched": honesty.kernels_launched,
    "hostile: malformed calls": malformed.run,
    **{f"hostile: {name}": partial(hostile.run, family=name) for name in FAMILIES},
}
GIVEN = "hostile: given"  # cases named by whoever asks
ORACLE = "oracle"  # runs at every cell
NOTES = "notes"  # needs no call
NAMES = (NOTES, ORACLE, *ALL)
