"""Early exit: a token leaves between servers where it is sure, and those behind go on without being waited for."""
