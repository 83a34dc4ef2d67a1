"""Simulates a swarm of thousands of servers on a virtual clock, with the placement and routing code of real peers."""
