"""Processes, the command line, and the offline `LLM`."""
