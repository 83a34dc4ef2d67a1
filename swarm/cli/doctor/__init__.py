"""What can be wrong with a machine that wants to take part, found out one by one, each with its remedy."""
