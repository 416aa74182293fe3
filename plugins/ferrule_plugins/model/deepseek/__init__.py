"""DeepSeek V2, V3 and V3.2, each a small change of the one before."""
