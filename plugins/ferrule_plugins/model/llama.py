"""Llama 1 to 3 (Touvron et al. 2023), and everything else with its shape: nothing is special."""

from __future__ import annotations

from ferrule_nn import Decoder, Naming


class Llama(Decoder):
    """RMS norm, rotary positions, grouped-query attention, gated MLP."""


class Yi(Llama):
    """The first files of Yi (Young et al. 2024), with other names for the norms."""

    naming = Naming(
        renames=((r"^model\.", ""), (r"\.ln1\.", ".input_layernorm."), (r"\.ln2\.", ".post_attention_layernorm."))
    )
