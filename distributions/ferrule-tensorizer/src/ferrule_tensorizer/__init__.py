"""Files of CoreWeave's tensorizer: what they say of their tensors, reading and writing them."""
