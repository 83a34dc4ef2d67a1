"""Tokenizers and chat templates of checkpoints, which may be a stranger's: from texts to tokens, within limits."""
