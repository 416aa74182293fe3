"""Assembles an engine from plugins: the model with its weights, then executor, scheduler and loop."""
