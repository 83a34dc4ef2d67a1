"""Weights that stay on flash: records on a drive, of which some are in memory.

block_plan         which of a block's tensors become records
planned_blocks     finds that, without weights
records            what a record is, records in memory, and the interface between computing and what holds the weights
files              packed files: written once, verified, found again
reading            many parallel reads from a drive
drive_measurement  how fast a drive is, for `swarm doctor`
neurons            feed-forward layers of which a token needs few neurons: approximate
experts            mixtures of experts: exact
streaming          every other block, read whole for each forward: exact
stay_priority      which experts and neurons stay in memory
memory_shares      how memory is divided among all of them
flash_span         puts them into the blocks of a span
"""
