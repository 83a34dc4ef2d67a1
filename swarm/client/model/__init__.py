"""The transformers model itself, with the swarm in the place of its blocks."""
