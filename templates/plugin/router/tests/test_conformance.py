from ferrule_example import ExampleRouter
from ferrule_testkit.kits import RouterKit


class TestConformance(RouterKit):
    plugin = ExampleRouter
