"""Gemma 3n."""
