"""What servers announce about themselves, and how others read it. With `swarm.transport`, the only importer of
hivemind."""
