"""Weights in nf4: decoding by Ferrule and by transformers with bitsandbytes, in turns, of one float checkpoint.

    python -m tools.benchmarks.nf4 --python VENV/bin/python FOLDER --streams 1,16

VENV is an environment with transformers, bitsandbytes and accelerate. Both quantize the checkpoint while they load it.
`tools.benchmarks.beside` says what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.env import before_libraries
from tools.benchmarks.beside import arguments, compare

_OTHER = """
import sys, time
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

threads = int(sys.argv[4])
clock = time.process_time if threads == 1 else time.perf_counter
torch.set_num_threads(threads)
kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=kind, dtype=torch.bfloat16, device_map="cpu"
).eval()
print("ready", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        streams, begun, steps = map(int, line.split())
        ids = torch.arange(3, 3 + begun).repeat(streams, 1)
        cache = model(ids, use_cache=True).past_key_values
        start = clock()
        for step in range(steps):
            model(torch.full((streams, 1), 3 + step), past_key_values=cache, use_cache=True)
        print(clock() - start, flush=True)
"""


def main(given: Sequence[str] | None = None) -> None:
    compare(arguments(__doc__, "FOLDER", given), _OTHER, "transformers with bitsandbytes", "bitsandbytes")


if __name__ == "__main__":
    before_libraries()
    main()
