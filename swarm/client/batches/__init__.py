"""Batches without a session: forward and backward passes through the servers."""
