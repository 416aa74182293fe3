"""Plugins of kind guided_decoding."""
