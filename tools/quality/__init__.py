"""What quantization loses: of a layer's output by scheme, and of the embedded model's answers."""
