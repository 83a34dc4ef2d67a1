"""Running a span: its sessions' caches, packed forwards, recorded and traced steps, gradients."""
