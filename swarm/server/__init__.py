"""A peer that holds a span of blocks and computes for others."""
