"""Checkpoints on disk or on the hub: reading the tensors and files that are needed."""
