"""Execution: what runs a model on a device, whichever executor asks for it, in whatever process.

An executor of one process makes a `WorkerThread` of `open_worker(config, plugins)` and passes its calls on. An executor
of other processes or machines does so there: it sends them the `WorkerSettings` and the set of plugins, then each
`StepPlan`, and gets a `StepResult` back. msgspec encodes all four.
"""

from ferrule.execution.inspection import open_worker
from ferrule.execution.thread import WorkerThread
from ferrule.execution.worker import Worker

__all__ = ["Worker", "WorkerThread", "open_worker"]
