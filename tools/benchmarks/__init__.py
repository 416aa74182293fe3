"""Benchmarks of single parts: the runner, products, kernels, the engine's host work, a GPU."""
