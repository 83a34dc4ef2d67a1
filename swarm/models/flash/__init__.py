"""Feed-forward weights that stay on flash: records on a drive, of which some are in memory.

sparsity       shares of records that tokens need together
weight_store   the interface between those who compute and whatever holds the weights
record_layout  what a record is, byte by byte; record_buffer: records in memory
files          packed files: written once, verified, found again
reading        many parallel reads from a drive, and how fast it is
neurons        feed-forward layers of which a token needs few neurons: approximate
experts        mixtures of experts: exact
costs          what a token costs, before it is computed
streaming      every other block, read whole for each forward: exact
"""
