"""Checks of what can keep a machine from taking part, each with a remedy."""
