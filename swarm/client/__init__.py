"""A peer that holds embeddings, final norm and head, and lets the swarm compute the blocks."""
