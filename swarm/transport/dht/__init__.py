"""A peer's node of the DHT: signed records, who keeps which of them, and how they are found.

It speaks hivemind's messages over libp2p, but shares no code of hivemind's DHT beyond identifiers: see
docs/decisions/0038. What a record means is decided above, by `RecordRules`.
"""
