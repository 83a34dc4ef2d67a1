"""Experts on flash: what caches read, and the speed beside mmap."""
