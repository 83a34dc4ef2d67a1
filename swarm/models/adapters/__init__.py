"""Soft prompts and LoRA factors on frozen blocks: their files, and the hooks that apply them."""
