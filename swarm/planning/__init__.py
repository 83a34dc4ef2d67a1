"""Plans which device of a private swarm holds which blocks, from the devices' memory, speed and links."""
