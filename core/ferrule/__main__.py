"""`python -m ferrule` is `ferrule`."""

from ferrule.launch.cli import main

main()
