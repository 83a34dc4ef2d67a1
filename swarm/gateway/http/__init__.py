"""HTTP mechanics that all endpoints share: bounded bodies, streams, clients that disconnect, middleware."""
