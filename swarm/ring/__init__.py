"""A ring of devices that its starter sets up: workers, pairing, plans, and the life of both sides."""
