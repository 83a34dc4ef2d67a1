"""Early exit: how sure a token is, what is trained for that, and which tokens leave. Shared by client and server."""
