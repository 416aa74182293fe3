"""Built-in banks of adapters."""
