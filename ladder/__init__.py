"""The runner: checks rungs against an exact oracle, times them against their parents, keeps the records.

`from ladder import chunk_kda` gives KDA's forward by the best rung for the arguments at hand (ladder/dispatch.py).
"""


def __getattr__(name: str):  # torch is imported with chunk_kda, and not before
    if name == "chunk_kda":
        from ladder.dispatch import chunk_kda

        return chunk_kda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
