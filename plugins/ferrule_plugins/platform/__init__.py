"""Platforms: kinds of devices."""
