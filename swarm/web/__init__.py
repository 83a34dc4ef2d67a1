"""What the HTTP servers of the gateway and the monitor share."""
