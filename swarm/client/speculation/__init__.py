"""Speculative decoding whose steps stream: guesses follow one another through the servers before any is verified."""
