"""Stand-ins for parts of Ferrule that only its own tests need; what plugins test with is `ferrule_testkit`."""
