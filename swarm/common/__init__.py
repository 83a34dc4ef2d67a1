"""Small helpers that every room may use: console output, units, YAML files, the version."""
