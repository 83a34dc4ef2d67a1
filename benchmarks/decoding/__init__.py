"""Speed of one client's tokens: chains, lanes, heads, prompts, and forms of weights."""
