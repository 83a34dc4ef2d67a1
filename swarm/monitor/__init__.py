"""What the swarm looks like now, from the DHT alone."""
