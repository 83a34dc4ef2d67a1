"""Weights that peers get from each other: what they are, who has them, and how they travel."""
