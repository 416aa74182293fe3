"""Logits processors that come with Ferrule, one module per plugin."""
