"""How outputs go on from one server to the next, and how often clients may have other peers dialed for that."""
