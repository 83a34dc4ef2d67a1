"""The compute thread and what decides its work: scheduling, batching, and the engine's loop."""
