"""Streams of frames between peers. Only this package and `swarm.dht` import hivemind."""
