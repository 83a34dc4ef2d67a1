"""What several benchmarks need: machines, models, networks with delays, tables."""
