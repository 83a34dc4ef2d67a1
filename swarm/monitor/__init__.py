"""What there is to see of a swarm, from its DHT alone: a page, JSON, and a table for the terminal."""
