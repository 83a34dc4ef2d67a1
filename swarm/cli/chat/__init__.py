"""A conversation in the terminal: over a gateway's HTTP, or straight in the swarm."""
