"""`ferrule quantize --to gptq` and `--to awq`: weights that are chosen by what a few texts put into each layer.

One decoder layer after the other is loaded, run with the calibration texts, quantized, run again as it is now, and
written. What is kept throughout is the hidden state of each token of these texts.
"""
