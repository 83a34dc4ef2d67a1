"""Reading many records from a drive at once, and measuring how fast it is."""
