"""Plugins of kind tool_parser."""
