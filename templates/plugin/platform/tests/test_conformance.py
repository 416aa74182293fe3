from ferrule_example import ExamplePlatform
from ferrule_testkit.kits import PlatformKit


class TestConformance(PlatformKit):
    plugin = ExamplePlatform
