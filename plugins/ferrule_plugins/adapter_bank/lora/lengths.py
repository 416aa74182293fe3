"""The texts that an adapter was trained with: how long they may be, and by what positions are then divided.

`context_length` of ``adapter_config.json`` says it, as LongLoRA's adapters do (Chen et al. 2024).
"""

from __future__ import annotations

import math

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import ContextScaling


def factor_of(context_length: int, scaling: ContextScaling | None) -> float | None:
    """Return the factor that an adapter's positions are divided by: None for the model's own, in the place of which it
    stands. Raises CheckpointError where no factor fits.

    A factor fits whose context is `context_length`, or else the next whole one, as training rounds it.
    """
    if scaling is None or not context_length:
        return None
    known = (scaling.own, *scaling.factors)
    rounded = float(math.ceil(context_length / scaling.original))
    exact = (factor for factor in known if round(scaling.original * factor) == context_length)
    factor = next(exact, rounded if rounded in known else None)
    if factor is None:
        have = ", ".join(f"{each:g}" for each in sorted(set(known)))
        raise CheckpointError(
            f"it was trained with a context_length of {context_length} tokens, {context_length / scaling.original:g} "
            f"times the model's {scaling.original}; there are the factors {have} (--long-lora-scaling-factors)."
        )
    return None if factor == scaling.own else factor
