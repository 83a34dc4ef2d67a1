"""Fine-tuning over the swarm: its speed, and its results."""
