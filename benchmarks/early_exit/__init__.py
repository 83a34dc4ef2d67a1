"""Early exit: speed and quality of texts whose tokens leave before the last block."""
