"""Acme's NPU for Ferrule."""
