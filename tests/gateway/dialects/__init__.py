"""Other interfaces than OpenAI's completions."""
