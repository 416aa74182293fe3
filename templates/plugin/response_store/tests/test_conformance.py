from ferrule_example import ExampleStore
from ferrule_testkit.kits import ResponseStoreKit


class TestConformance(ResponseStoreKit):
    plugin = ExampleStore
