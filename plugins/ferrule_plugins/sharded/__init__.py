"""The state that each worker of vLLM holds: what its parameters are called, and which part of a tensor a rank has."""
