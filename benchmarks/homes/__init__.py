"""Servers at home behind routers: how soon they serve, what relays cost, and how they spread over relays."""
