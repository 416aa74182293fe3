"""Building blocks of load formats, and of commands that read one checkpoint and write another.

    shards              which files of a folder hold weights, their index, and progress over their bytes
    safetensors         headers, checked, and tensors of safetensors files; `safetensors_writer` writes these files
    locations           the devices that torch files name
    workers             names and parts of the parameters that a worker of vLLM holds
    s3                  files of an object store
    gguf                metadata, names, types and tokens of GGUF files
    commands            options of `ferrule serve` that a command has too, and its start
    offline             a model without weights, conversations as texts, and attention without a cache, for a command
    folder              folders that a command writes: all of one, or nothing

Nothing here is imported by importing the package: the launcher reads GGUF files without torch.
"""
