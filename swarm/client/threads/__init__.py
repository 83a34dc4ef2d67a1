"""Threads of one client: the network's event loop, and the lock on this process's computing."""
