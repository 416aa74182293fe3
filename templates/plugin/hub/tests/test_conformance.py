from ferrule_example import ExampleHub
from ferrule_testkit.kits import HubKit


class TestConformance(HubKit):
    plugin = ExampleHub
