"""What Ferrule gives to tests, its own and those of plugins: fakes, a clock, the simulator, kits and their samples."""
