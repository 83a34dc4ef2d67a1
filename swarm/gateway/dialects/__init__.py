"""Other interfaces than OpenAI's completions. Each translates its requests into chat requests, and writes answers."""
