"""The lock of a private swarm: peers prove their membership to each other, on every stream and in the DHT."""
