"""Small helpers for all packages: console output, units, files, processes, dtypes, the version."""
