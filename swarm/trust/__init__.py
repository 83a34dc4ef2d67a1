"""What a peer has done, in a form that others can check: records of sessions, and signed receipts of them."""
