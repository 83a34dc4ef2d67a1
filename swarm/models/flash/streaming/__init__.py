"""Blocks of any kind, read one after the other for each forward."""
