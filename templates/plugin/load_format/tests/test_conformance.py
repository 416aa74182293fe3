from ferrule_example import ExampleFormat
from ferrule_testkit.kits import LoadFormatKit


class TestConformance(LoadFormatKit):
    plugin = ExampleFormat
