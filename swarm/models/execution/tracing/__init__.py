"""Forwards without the family's modules: traced, flattened, divided into blocks, compiled."""
