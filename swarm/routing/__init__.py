"""Route planning: pure functions from a snapshot of the swarm to a route. No torch, no hivemind, no clock."""
