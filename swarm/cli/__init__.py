"""The console script `swarm`: thin commands over the rooms below. Nobody imports this room."""
