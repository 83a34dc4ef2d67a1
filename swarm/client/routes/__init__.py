"""Which servers a client uses, and what happens to its sessions on the way."""
