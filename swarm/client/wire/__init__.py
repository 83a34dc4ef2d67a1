"""What a client sends and receives: packed hidden states, checked replies, timeouts, adapters."""
