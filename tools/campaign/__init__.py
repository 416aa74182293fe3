"""Drivers that attack a running server from outside, and say what it cost."""
