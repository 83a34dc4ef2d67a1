"""Feed-forward layers whose activation is zero for most neurons: only those that a token needs are read."""
