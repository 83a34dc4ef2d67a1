"""Measurements. Every figure is taken in one run, next to what it is compared with."""
