"""Plans: which of a block's tensors become records, and the block without them."""
