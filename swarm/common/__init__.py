"""Small helpers for all packages: console output, units, checked JSON, YAML files, dtypes, the version."""
