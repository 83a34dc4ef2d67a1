"""The version of this package, defined here only."""

VERSION = "0.1.0"
