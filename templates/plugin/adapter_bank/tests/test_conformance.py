from ferrule_example import ExampleBank
from ferrule_testkit.kits import AdapterBankKit


class TestConformance(AdapterBankKit):
    plugin = ExampleBank
