"""Lanes: several independent sequences in flight at once, so that no server waits."""
