"""Cutting a model family's own model into spans: its families, its structure, and the surgery."""
