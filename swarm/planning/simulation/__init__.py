"""A swarm of thousands of servers on a virtual clock, which decide with the very functions that real servers use."""
