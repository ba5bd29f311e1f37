"""Kimi Delta Attention (KDA): contract, oracle, error budget, inputs, cases and rivals."""
