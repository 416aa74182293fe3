"""Routes of Text Generation Inference, as a router plugin of Ferrule."""
