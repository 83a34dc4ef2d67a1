"""Linear layers whose weights never change: prepacked for the processor, or quantized."""
