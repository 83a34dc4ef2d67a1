"""Answers of a requested form: JSON, JSON of a schema, and calls of tools as each family of models writes them."""
