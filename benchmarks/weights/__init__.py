"""Weights that peers get from each other: how fast they travel, and what that costs."""
