"""Policies: the order of requests."""
