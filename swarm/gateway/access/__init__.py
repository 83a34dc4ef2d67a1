"""Which clients and web pages may use the gateway: authentication by API key, CORS, and a check of the Host header."""
