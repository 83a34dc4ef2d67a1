"""Python processes that are started beside this one, and end with it."""
