"""Small helpers for all packages: console output, units, YAML files, the version."""
