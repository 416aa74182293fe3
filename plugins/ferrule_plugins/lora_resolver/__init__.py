"""Built-in resolvers of adapters."""
