"""Packed files: a block's weights, written once as records that are read in one piece, verified, found again.

block_files     where they lie; locks between processes
manifest        what they hold, and the checks of a file that may hold anything
record_writing  the bytes, in order
preparation     writes what is missing, if there is room; prepared_block: what was written, checked and open
"""
