"""Acme's question protocol for Ferrule."""
