"""GGUF files: what is in them, and what a model folder would say of the same model."""
