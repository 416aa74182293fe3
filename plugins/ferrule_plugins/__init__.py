"""Built-in plugins: one sub-package per kind, one module per plugin."""
