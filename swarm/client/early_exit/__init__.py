"""Early exit between servers: a token leaves where it is sure, and the servers behind go on without being waited for.

options        what `generate(early_exit=...)` takes
verification   what becomes of a sampled token that left, once the full model's answer is there (pure)
look_meter     whether a look at a token on its way can save time (pure)
group_size     how many steps are verified together, where one server computes both sides of a boundary (pure)
pacing         how each step is sent off, after these two
hidden_reader  what this client makes of hidden states on their way
exit_terms     what servers are asked about exits inside their spans
token_output   where the tokens go: to the caller's streamer, also provisionally
exit_decoder   the loop
"""
