"""GGUF files as llama.cpp reads them: their description, their tokenizer and their blocks."""
