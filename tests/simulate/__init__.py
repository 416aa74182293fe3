"""Deterministic simulation: the scheduler under random work, and the bugs that must be caught."""
