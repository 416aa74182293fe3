"""Guided decoding, up to the engine: constraints of requests, and their compilation in children."""
