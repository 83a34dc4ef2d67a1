"""How fast a server is: its blocks and its links."""
