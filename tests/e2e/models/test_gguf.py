"""`ferrule serve model.gguf` with nothing else, and with another tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gguf
import httpx
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file

from ferrule import checkpoint
from ferrule_contrib import tiny
from ferrule_testkit import server as servers
from tests.unit.plugins.gguf import converted

ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}


def write_shards(folder: Path, kind: GGMLQuantizationType) -> Path:
    """Write the embedded model's weights in three files, of which the first is returned."""
    values = checkpoint.read(tiny.path())
    config = SimpleNamespace(**values)
    writer = GGUFWriter(str(folder / "tiny.gguf"), "llama", split_max_tensors=20)
    converted.add_numbers(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in load_file(tiny.path() / "model.safetensors").items():
        for own, part in converted.llama(config, name, tensor):
            found = names.get_name(own, (".weight",))
            assert found is not None
            data = part.float().contiguous().numpy()
            if data.ndim == 1:
                writer.add_tensor(found, data)
            else:
                writer.add_tensor(found, quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(folder.glob("*.gguf"))
    assert [file.name for file in files] == [f"tiny-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    return files[0]


def test_a_series_of_files_is_served_and_comes_back_after_sleep(tmp_path: Path) -> None:
    first = write_shards(tmp_path, GGMLQuantizationType.Q8_0)
    args = [str(first), "--tokenizer", str(tiny.path()), "--enable-sleep-mode", "--num-gpu-blocks-override", "64"]
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (
        servers.running(args, tmp_path / "log", env) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        told = client.get("/server_info").json()["model"]
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        before = client.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]["content"]
        assert client.post("/sleep?level=2").status_code == 200
        assert client.post("/wake_up").status_code == 200
        after = client.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]["content"]
    assert told["quantization"] == "gguf"
    assert names == [str(first)]
    assert "Paris" in before
    assert after == before
