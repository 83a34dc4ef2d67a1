"""The wire protocol between peers: typed messages, frames, and encoded tensors. Never pickle."""
