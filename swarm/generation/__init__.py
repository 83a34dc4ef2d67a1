"""Text generation without HTTP: prompts, sampling, stop sequences, tool calls, response formats, and one swarm session
for each sequence. The gateway and the chat in the terminal are built on it."""
