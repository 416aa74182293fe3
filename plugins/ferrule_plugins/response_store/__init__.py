"""Built-in plugins of the kind `response_store`."""
