"""`--num-gpu-blocks-override` is the number of blocks that requests can use."""

from __future__ import annotations

from ferrule import LLM
from ferrule_contrib import tiny


def test_the_number_is_of_usable_blocks() -> None:
    with LLM(str(tiny.path()), num_gpu_blocks_override=40, max_num_seqs=2, use_tqdm_on_load=False) as llm:
        assert llm._backend.client.num_blocks == 1 + 40  # type: ignore[attr-defined]  # the null block is one more
