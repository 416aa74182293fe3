"""`ferrule quantize --to gptq` and `--to awq`: weights chosen by the inputs that a few texts give to each layer.

One decoder layer after the other is loaded, run with the calibration texts, quantized, run again with its new weights,
and written. Only the hidden state of each token of these texts is kept throughout.
"""
