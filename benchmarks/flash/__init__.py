"""Weights on flash: the figures of "LLM in a flash" on this machine."""
