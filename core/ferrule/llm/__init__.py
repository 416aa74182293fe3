"""The public offline API: `LLM`, and what it takes and returns."""
