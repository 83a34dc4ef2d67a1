"""Which requests may run now: API keys with their limits, rate limits, and a fair queue."""
