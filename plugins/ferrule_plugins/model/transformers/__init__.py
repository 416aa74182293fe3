"""`transformers`: any causal language model of that library, and of a checkpoint's own code.

build    the library's configuration and model, filled with tensors that a Ferrule load format has read
flat     the fast way: the library's modules compute everything but attention, which goes to the paged cache
rows     the other way, for every class: requests run one after another through the library's own forward pass
caches   what a cache object of the library holds, taken apart into what blocks and slots keep
check    does the flat way compute what the class computes?
rope     rotations that depend on the length of the request
linears  quantization of the library's linear layers
"""

from ferrule_plugins.model.transformers.model import TransformersModel

__all__ = ["TransformersModel"]
