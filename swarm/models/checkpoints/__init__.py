"""Checkpoints on disk or on the hub: reading just the tensors and files that are needed."""
