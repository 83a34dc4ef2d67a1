"""Early exit between servers: a token leaves where it is sure, and the servers behind go on without being waited for.

options        what `generate(early_exit=...)` takes
exit_terms     what servers are asked about exits inside their spans
exit_decoder   the loop; what it reads from hidden states, when it looks at them, and how it verifies
token_output   where the tokens go: to the caller's streamer, also provisionally
"""
