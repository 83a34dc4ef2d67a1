"""The starter of a ring: who holds what, and what is said to the workers."""
