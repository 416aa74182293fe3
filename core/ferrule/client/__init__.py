"""Clients of the engine: in this process or another, with the same interface."""
