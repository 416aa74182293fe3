"""Drivers that put a real server under load and say how it bore it; no test of the suite depends on their figures."""
