"""Executors' common parts: what turns a configuration into a loaded model that runs plans."""
