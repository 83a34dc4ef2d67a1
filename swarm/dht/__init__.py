"""Announcements of servers in the DHT, and how other peers read them. Only this package and `swarm.transport` import
hivemind."""
