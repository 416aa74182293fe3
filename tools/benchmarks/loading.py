"""Loading a checkpoint beside reading its files: bytes per second of each load format, and the most memory it takes.

    python -m tools.benchmarks.loading FOLDER --rounds 5
    python -m tools.benchmarks.loading FOLDER --make-llama-1b      # a random one of Llama 3.2 1B's shape, 2.5 GB

Each load is a process of its own: it imports everything, and then builds the model, reads the weights into it and packs
them for the kernels. Formats take turns with two plain reads of the same files: into one small buffer, and into
new memory, as weights need it. Files are in the page cache. Rates count the processor's seconds of all threads, so that
other work on the machine matters little; `wall` is by the clock. Memory is the process's largest resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FORMATS = ("safetensors", "fastsafetensors", "runai_streamer", "pt")
_BUFFER = 8 << 20
_MIB = 2**20


def _files(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob("*.bin" if name == "pt" else "*.safetensors"))


def _timed(work: Callable[[], object]) -> dict[str, float]:
    start, used = time.monotonic(), time.process_time()
    work()
    return {"wall": time.monotonic() - start, "used": time.process_time() - used}


def _to_buffer(files: Sequence[Path]) -> None:
    buffer = memoryview(bytearray(_BUFFER))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _to_memory(files: Sequence[Path]) -> list[Any]:
    import torch

    found = []
    for file in files:
        found.append(torch.empty(file.stat().st_size, dtype=torch.uint8))
        view = found[-1].numpy().data
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(view[: 1 << 30]):
                view = view[count:]
    return found


def _status(key: str) -> int:
    """Return a number of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _loaded(folder: Path, name: str, threads: int) -> dict[str, float]:
    import torch

    from ferrule.assembly.choose import PluginChooser
    from ferrule.assembly.memory import weight_tensors
    from ferrule.assembly.model import build, fill, pack
    from ferrule.config import Config, DeviceConfig, LoadConfig, ModelConfig
    from ferrule.config.resolve import resolve
    from ferrule.plugin import discover

    plugins = discover()
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="bfloat16"),
            load=LoadConfig(load_format=name, use_tqdm_on_load=False),
            device=DeviceConfig(device="cpu"),
        )
    )
    chooser = PluginChooser(plugins)
    device = chooser.device(config)
    torch.set_num_threads(threads)
    choice = chooser.before_build(config, device)
    source = chooser.weight_format(config)()
    model: Any = None

    def filled() -> None:
        nonlocal model
        model = build(choice)
        fill(model, choice, source)

    before = _status("VmRSS")
    found = {f"fill_{key}": value for key, value in _timed(filled).items()}
    found |= {f"pack_{key}": value for key, value in _timed(lambda: pack(model)).items()}
    weights = sum(tensor.nbytes for tensor in weight_tensors(model))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "before": before, "peak": peak, "weights": weights}


def _child(folder: Path, what: str, threads: int) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tools.benchmarks.loading",
        str(folder),
        "--child",
        what,
        "--threads",
        str(threads),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(folder: Path, what: str, threads: int) -> dict[str, float]:
    files = _files(folder, what)
    if what == "buffer":
        return _timed(lambda: _to_buffer(files))
    if what == "memory":
        kept: list[Any] = []
        import torch  # noqa: F401 - not a part of what is timed

        return _timed(lambda: kept.append(_to_memory(files)))
    _to_buffer(files)  # into the page cache
    return _loaded(folder, what, threads)


def _show(rows: dict[str, list[dict[str, float]]], sizes: dict[str, int]) -> None:
    reads = {what: [sizes["safetensors"] / row["used"] for row in rows[what]] for what in ("buffer", "memory")}
    for what, rates in reads.items():
        wall = statistics.median(sizes["safetensors"] / row["wall"] for row in rows[what])
        print(f"plain read, {what}: {statistics.median(rates) / _MIB:,.0f} MiB/s (wall {wall / _MIB:,.0f})")
    print("format, read and packed in MiB/s; read alone, and its ratio to a read into memory; peak and its ratio")
    for name in [name for name in FORMATS if name in rows]:
        mine = rows[name]
        whole = [sizes[name] / (row["fill_used"] + row["pack_used"]) for row in mine]
        alone = [sizes[name] / row["fill_used"] for row in mine]
        ratios = [rate / plain for rate, plain in zip(alone, reads["memory"], strict=True)]
        wall = statistics.median(sizes[name] / row["fill_wall"] for row in mine)
        peak = statistics.median(row["peak"] for row in mine)
        before = statistics.median(row["before"] for row in mine)
        weights = mine[0]["weights"]
        print(
            f"{name}: {statistics.median(whole) / _MIB:,.0f}; {statistics.median(alone) / _MIB:,.0f} "
            f"(wall {wall / _MIB:,.0f}), {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"peak {peak / _MIB:,.0f} MiB of {weights / _MIB:,.0f} MiB of weights: {peak / weights:.2f}, "
            f"{(peak - before) / weights:.2f} without the {before / _MIB:,.0f} MiB before"
        )


def _make(folder: Path) -> None:
    """Write a random checkpoint of Llama 3.2 1B's shape, as .safetensors and as .bin."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--make-llama-1b", action="store_true", help="write the checkpoint first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_measure(args.folder, args.child, args.threads)))
        return
    if args.make_llama_1b:
        args.folder.mkdir(parents=True, exist_ok=True)
        _make(args.folder)
    names = [name for name in args.formats if _files(args.folder, name)]
    if "safetensors" not in names:
        raise SystemExit(f"{args.folder} has no .safetensors file.")
    sizes = {name: sum(file.stat().st_size for file in _files(args.folder, name)) for name in names}
    print(f"{sizes['safetensors'] / _MIB:,.0f} MiB, {args.threads} threads of {os.cpu_count()}, {args.rounds} rounds")
    rows: dict[str, list[dict[str, float]]] = {what: [] for what in ("buffer", "memory", *names)}
    _child(args.folder, "buffer", 1)
    for _ in range(args.rounds):
        for what, found in rows.items():
            found.append(_child(args.folder, what, args.threads))
    _show(rows, sizes)


if __name__ == "__main__":
    main()
