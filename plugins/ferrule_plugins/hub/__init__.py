"""Hubs: where models come from."""
