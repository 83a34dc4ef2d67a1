"""How bytes get from peer to peer. With `swarm.dht`, the only importer of hivemind."""
