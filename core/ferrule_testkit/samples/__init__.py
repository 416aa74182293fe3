"""Samples of what built-in plugins read and write, for their kits: a plugin names its own as `conformance`."""
