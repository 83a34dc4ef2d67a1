"""Adapters (soft prompts and LoRA) on frozen blocks: their files, and the hooks that apply them."""
