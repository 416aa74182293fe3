"""Zamba 2."""
