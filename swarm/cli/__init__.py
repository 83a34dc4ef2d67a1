"""The console script `swarm`: thin commands over the other packages. No other package imports this one."""
