"""What all rungs share and nothing else: targets, compiled units, the call cache, code hashes."""
