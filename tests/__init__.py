"""The tests, a package so that they can share what is planted: `tests.simulate.bugs`."""
