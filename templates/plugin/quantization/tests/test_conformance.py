from ferrule_example import ExampleQuantization
from ferrule_testkit.kits import QuantizationKit


class TestConformance(QuantizationKit):
    plugin = ExampleQuantization
