"""OpenAI's HTTP interface as data: requests, responses and errors in its form."""
