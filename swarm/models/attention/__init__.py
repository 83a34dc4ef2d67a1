"""How attention is computed and where its keys and values lie: contiguous, paged or padded."""
