"""transformers models cut into spans (servers) and reduced to embeddings and head (clients).

This is the only room that imports transformers.
"""
