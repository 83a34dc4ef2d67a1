"""The lock of a private swarm: members prove to each other that they are, on every stream and in the DHT."""
