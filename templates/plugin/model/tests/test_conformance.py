from ferrule_example import Example
from ferrule_testkit.kits import ModelKit


class TestConformance(ModelKit):
    plugin = Example
