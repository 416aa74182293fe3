from ferrule_example import ExampleToolParser
from ferrule_testkit.kits import ToolParserKit


class TestConformance(ToolParserKit):
    plugin = ExampleToolParser
