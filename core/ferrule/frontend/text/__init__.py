"""Between conversations, text and token ids: templates, tokenizers, detokenizers."""
