"""How fast a server is: its blocks, its links, and what was measured before."""
