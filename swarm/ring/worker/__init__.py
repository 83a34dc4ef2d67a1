"""A worker: what the device is, what it was assigned, and the server that it runs for that."""
