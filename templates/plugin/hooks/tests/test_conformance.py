from ferrule_example import ExampleHooks
from ferrule_testkit.kits import HooksKit


class TestConformance(HooksKit):
    plugin = ExampleHooks
