"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with merged projections in the checkpoint, and LongRoPE.

The merged matrices have the names and the order that ours have, so nothing is renamed.
"""

from __future__ import annotations

from ferrule_nn import Decoder


class Phi3(Decoder):
    config_defaults = {"rms_norm_eps": 1e-5}
