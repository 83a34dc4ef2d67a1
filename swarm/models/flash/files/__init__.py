"""Packed files of records: written once, verified, found again, removed."""
