from ferrule_example import ExampleAttention
from ferrule_testkit.kits import AttentionKit


class TestConformance(AttentionKit):
    plugin = ExampleAttention
