"""Fine-tuning: what is trained at this client, how it enters the frozen model, and its files."""
