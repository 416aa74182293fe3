from ferrule_example import ExampleCommand
from ferrule_testkit.kits import CommandKit


class TestConformance(CommandKit):
    plugin = ExampleCommand
