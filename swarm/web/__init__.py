"""The HTTP server that the gateway and the monitor share."""
