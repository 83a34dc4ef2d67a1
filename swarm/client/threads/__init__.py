"""The threads of one client: the network's event loop, and the lock that lanes compute under."""
