"""The swarm behind OpenAI's HTTP interface, with a page to chat on."""
