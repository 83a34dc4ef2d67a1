"""Which blocks a server holds: its first choice, and when it moves. Pure decisions, and one loop."""
