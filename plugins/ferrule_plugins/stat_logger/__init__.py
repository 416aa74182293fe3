"""Where figures go, one module per plugin."""
