"""What Ferrule gives to tests, its own and those of plugins: fakes, a virtual clock, the simulator."""
