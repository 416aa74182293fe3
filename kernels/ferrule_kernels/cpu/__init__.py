"""Kernels for CPUs, in C++: `library` finds or builds them, the other modules hand them tensors."""
