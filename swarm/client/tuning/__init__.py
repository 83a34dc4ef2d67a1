"""Fine-tuning: the parameters that this client trains, how they enter the frozen model, and their files."""
