"""GGUF files: decoding by Ferrule and by llama.cpp, in turns, of the same file.

    python -m tools.benchmarks.llama_cpp --python VENV/bin/python Q4_0.gguf Q8_0.gguf --streams 1,16 --threads 2

VENV is an environment with llama-cpp-python. llama.cpp has a cache for each stream, and tokens are arbitrary.
`tools.benchmarks.beside` says what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.env import before_libraries
from tools.benchmarks.beside import arguments, compare

_OTHER = """
import ctypes, sys, time
import llama_cpp as api

file, most, context, threads = sys.argv[1], *map(int, sys.argv[2:])
clock = time.process_time if threads == 1 else time.perf_counter
quiet = api.llama_log_callback(lambda *_: None)
api.llama_log_set(quiet, ctypes.c_void_p(0))
api.llama_backend_init()
model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
options = api.llama_context_default_params()
options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = most * context, most, 2048, 512
options.n_threads = options.n_threads_batch = threads
options.kv_unified = False
state = api.llama_init_from_model(model, options)
batch = api.llama_batch_init(2048, 0, 1)

def decode(rows):
    for i, (token, position, stream, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = stream
    batch.n_tokens = len(rows)
    if api.llama_decode(state, batch):
        raise SystemExit("llama.cpp cannot compute the batch")
    api.llama_synchronize(state)

print("ready", flush=True)
for line in sys.stdin:
    streams, begun, steps = map(int, line.split())
    api.llama_memory_clear(api.llama_get_memory(state), True)
    for stream in range(streams):
        prompt = [(3 + i, i, stream, i == begun - 1) for i in range(begun)]
        began = time.perf_counter()
        decode(prompt)
        begin = time.perf_counter() - began
    start = clock()
    for step in range(steps):
        decode([(3 + (7 * step + stream) % 200, begun + step, stream, True) for stream in range(streams)])
    print(clock() - start, begin, flush=True)
"""


def main(given: Sequence[str] | None = None) -> None:
    compare(arguments(__doc__, "FILE.gguf", given), _OTHER, "llama.cpp")


if __name__ == "__main__":
    before_libraries()
    main()
