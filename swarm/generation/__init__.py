"""Generating text for people: sampling, pieces of text, stop sequences, tool calls and wanted forms. Free of HTTP."""
