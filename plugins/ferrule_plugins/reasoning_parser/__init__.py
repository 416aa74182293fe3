"""Plugins of kind reasoning_parser."""
