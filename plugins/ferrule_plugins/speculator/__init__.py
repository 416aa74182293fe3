"""Built-in speculators."""
