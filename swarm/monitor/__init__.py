"""Shows the state of a swarm, read from its DHT alone: as a page, as JSON, and as text for the terminal."""
