"""Instruction handlers, one per opcode family of the PTX manual; loaded by emulator.bind."""
