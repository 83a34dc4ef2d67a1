"""Sessions and requests of clients: messages, validation, cache allocation, pushes, adapters."""
