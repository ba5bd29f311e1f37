"""Mutants that nothing finds, and why that is right: {(rung, arch): {name of the mutant: reason}}."""

JUSTIFIED: dict[tuple[str, str], dict[str, str]] = {}
