from ferrule_example import ExampleTokenizers
from ferrule_testkit.kits import TokenizerKit


class TestConformance(TokenizerKit):
    plugin = ExampleTokenizers
