"""One server's part of a session: what it was sent, how far it is, and the stream to it."""
