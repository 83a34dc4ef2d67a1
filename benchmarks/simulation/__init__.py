"""Simulates a swarm of thousands of servers on a virtual clock, with the placement code of real servers."""
