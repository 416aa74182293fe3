"""Kernels: for each operation a reference in torch and faster implementations."""
