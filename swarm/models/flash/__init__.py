"""Weights that stay on flash: records on a drive, of which some are in memory.

records    what a record is, records in memory, and the interface between computing and whatever holds the weights
plans      which of a block's tensors become records
files      packed files: written once, verified, found again
reading    many parallel reads from a drive, and how fast it is
neurons    feed-forward layers of which a token needs few neurons: approximate
experts    mixtures of experts: exact
streaming  every other block, read whole for each forward: exact
costs      what a token costs, before it is computed
attach     puts all of them into the blocks of a span, within one budget of memory
"""
