"""Who belongs to a private swarm: certificates, invites, revocations, and the authority that signs them. No network."""
