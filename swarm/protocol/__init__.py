"""What travels between peers: typed messages, frames, and packed tensors. Never pickle."""
