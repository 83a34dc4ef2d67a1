"""One session's chain of servers: its hops, what each was sent, and how a lost server is replaced."""
