"""The adapters that clients may name as a model: which there are, how they are loaded, and who is asked for others."""
