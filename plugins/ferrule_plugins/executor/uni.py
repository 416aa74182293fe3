"""`uni`: one device, driven from the engine's process."""

from ferrule.execution.uni import UniExecutor

__all__ = ["UniExecutor"]
