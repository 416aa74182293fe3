"""From a client's request to the engine and back: templates, tokens, text. No torch, no HTTP."""
