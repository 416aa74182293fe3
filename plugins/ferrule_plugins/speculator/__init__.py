"""Speculators: sources of guesses at next tokens."""
