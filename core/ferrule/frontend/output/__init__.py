"""The conversion of the engine's deltas to outputs: choices, stop strings, parsers, searches."""
