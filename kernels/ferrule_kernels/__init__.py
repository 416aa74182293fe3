"""Kernels: per operation a torch reference and its faster forms."""
