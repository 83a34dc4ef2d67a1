"""Work of servers that is computed again elsewhere, to find out whether it was right."""
