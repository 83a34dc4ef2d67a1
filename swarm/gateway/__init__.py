"""A gateway: serves models of the swarm over OpenAI's HTTP interface, and a chat page."""
