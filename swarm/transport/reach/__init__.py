"""Whether other peers can reach this one, and by which way: directly, or through relays."""
