from ferrule_example import ExampleResolver
from ferrule_testkit.kits import LoraResolverKit


class TestConformance(LoraResolverKit):
    plugin = ExampleResolver
