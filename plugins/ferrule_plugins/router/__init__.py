"""HTTP routes, one module per router plugin; `openai_*` are the parts of `openai`."""
