"""The HTTP frame: gate, limits, routing, server-sent events, life cycle. Routes themselves are plugins."""
