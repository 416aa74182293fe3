from ferrule_example import ExampleExecutor
from ferrule_testkit.kits import ExecutorKit


class TestConformance(ExecutorKit):
    plugin = ExampleExecutor
