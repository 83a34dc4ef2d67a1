"""Loading a span: its weights in memory, or on flash with what that has to prepare."""
