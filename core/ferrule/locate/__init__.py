"""From what the user calls the model to a folder on this machine."""
