"""What servers have done: records of sessions, signed receipts of them, and how far honest results differ."""
