"""Linear layers whose weights never change: arranged for the processor, or quantized."""
