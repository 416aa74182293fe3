"""The commands of `ferrule`."""
