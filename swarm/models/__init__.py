"""transformers models, cut into spans for servers and reduced to embeddings and head for clients.

Only this package and `swarm.generation` import transformers.
"""
