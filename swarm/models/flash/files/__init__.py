"""Packed files: a block's weights, written once as records that are read in one piece, verified, found again.

block_files      where they lie
manifest         what they hold, and the checks of a file that may hold anything
content_digests  digests of files in parts; folder_locks: between processes
planned_blocks   what will be written, found without weights
drive_space      whether there is room for them
record_writing   the bytes, in order
preparation      writes what is missing; prepared_block: what was written, checked and open
inventory        what lies there; removing it
"""
