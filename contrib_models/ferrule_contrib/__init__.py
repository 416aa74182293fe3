"""Models contributed to Ferrule, each in its own folder."""
