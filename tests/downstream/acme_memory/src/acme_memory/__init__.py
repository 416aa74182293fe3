"""AcmeMemory for Ferrule."""
