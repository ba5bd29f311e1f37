"""The runner: checks rungs against an exact oracle, times them against their parents, keeps the records."""
