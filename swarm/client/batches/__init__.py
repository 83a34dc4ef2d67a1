"""Batches without a session: forward and backward passes of whole sequences through the servers."""
