"""Gemma 4."""
