"""Mixtures of experts: an expert is read when a token is sent to it, and kept while it is used often."""
