"""Plans to tensors and back: persistent state per slot, one forward per step."""
