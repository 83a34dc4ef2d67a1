"""The starter of a ring: which machine holds which blocks, and what the workers are told."""
