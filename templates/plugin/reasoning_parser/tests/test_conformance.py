from ferrule_example import ExampleReasoningParser
from ferrule_testkit.kits import ReasoningParserKit


class TestConformance(ReasoningParserKit):
    plugin = ExampleReasoningParser
