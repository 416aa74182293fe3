"""Formats of weights."""
