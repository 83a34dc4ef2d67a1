"""Blocks of any kind, read one after the other for each forward: exact, and slow unless many tokens are computed.

streamed_site  which of a block's tensors are streamed
residency      which blocks stay in memory within a budget (pure)
block_stream   the others, read in order into two buffers: one is computed with while the other is filled
"""
