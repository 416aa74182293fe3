"""Llama 1 to 3 (Touvron et al. 2023), and everything else with its shape: nothing is special."""

from __future__ import annotations

from ferrule_nn import Decoder


class Llama(Decoder):
    """RMS norm, rotary positions, grouped-query attention, gated MLP."""
