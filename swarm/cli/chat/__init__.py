"""A conversation in the terminal, over a gateway's HTTP interface or directly in the swarm."""
