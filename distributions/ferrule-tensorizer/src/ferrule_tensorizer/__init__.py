"""Files of CoreWeave's tensorizer: their layout, reading and writing them."""
