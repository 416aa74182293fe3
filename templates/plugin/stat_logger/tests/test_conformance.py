from ferrule_example import ExampleLogger
from ferrule_testkit.kits import StatLoggerKit


class TestConformance(StatLoggerKit):
    plugin = ExampleLogger
