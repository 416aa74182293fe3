from ferrule_example import ExampleBackend
from ferrule_testkit.kits import GuidedDecodingKit


class TestConformance(GuidedDecodingKit):
    plugin = ExampleBackend
