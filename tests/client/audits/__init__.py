"""Work of servers that is computed again elsewhere."""
