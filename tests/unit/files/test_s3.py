"""Models of an S3 store: a fake one on loopback, which can misbehave."""

import fcntl
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from botocore.loaders import create_loader
from safetensors.torch import save

from ferrule.config import Config, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError, StartupError
from ferrule.interfaces.hub import Repository
from ferrule.locate.localise import check_remote, localise
from ferrule.plugin import discover
from ferrule_files.s3 import fetch as fetching
from ferrule_files.s3 import store as stores
from ferrule_plugins.hub import s3 as hub
from ferrule_plugins.hub.s3 import S3
from ferrule_plugins.load_format.runai_streamer import RunaiStreamer
from ferrule_plugins.load_format.safetensors import Safetensors
from ferrule_tensorizer.load_format import Tensorizer
from ferrule_tensorizer.write import write
from tests.fake_s3 import KEY_ID, SECRET, FakeS3, environment, etag, fake_s3, listing

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(40_000, dtype=torch.bfloat16)}
MORE = {"c": torch.arange(4)}
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
MODEL = {
    "models/tiny/": b"",
    "models/tiny/config.json": CONFIG,
    "models/tiny/tokenizer.json": b"{}",
    "models/tiny/model.safetensors": save(WEIGHTS),
    "models/tiny/pytorch_model.bin": b"p",
    "models/tiny/onnx/model.json": b"{}",
    "models/tiny/code.py": b"raise SystemExit",
    "models/tiny-2/config.json": b"another",
}
NAME = "s3://bucket/models/tiny"
LOADER = create_loader()  # of what boto3 knows of S3: it would be read anew for each client
PLUGINS = discover()


@pytest.fixture
def store(monkeypatch, tmp_path):
    with fake_s3({"bucket": dict(MODEL)}) as running:
        for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "RUNAI_"))]:
            monkeypatch.delenv(name)
        for name, value in {**environment(running), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("botocore.session.create_loader", lambda *_: LOADER)
        yield running


def configured(name=NAME, load_format="auto", **model):
    return resolve(Config(model=ModelConfig(model=name, **model), load=LoadConfig(load_format=load_format)))


def find(name=NAME, load_format="auto", **model):
    return Path(localise(configured(name, load_format, **model), PLUGINS).model.model)


def files(folder):
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())


def fetch(*patterns, name=NAME, folder=None):
    return S3().fetch(Repository(name, folder=folder), lambda names: patterns or ("*",))


def load(source, folder, **options):
    return dict(source.tensors(folder, torch.nn.Module(), options))


def refused(call=fetch, *args, **kwargs):
    """Return the error, which names no key."""
    with pytest.raises(StartupError) as caught:
        call(*args, **kwargs)
    said = f"{caught.value} {caught.value.hint}"
    assert SECRET not in said
    assert KEY_ID not in said
    assert len(said) < 1000
    return said


# ------------------------------------------------------------------------------------------------- fetching


def test_a_model_is_fetched_once(store, tmp_path):
    folder = find()
    assert files(folder) == [
        fetching.LISTING, ".ferrule-s3.lock", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "model.safetensors").read_bytes() == MODEL["models/tiny/model.safetensors"]
    assert folder.is_relative_to(tmp_path / "cache" / "ferrule" / "s3")
    assert set(store.fetched()) == {f"models/tiny/{name}" for name in files(folder) if name[0] != "."}
    assert find() == folder
    assert store.fetched() == []


def test_what_changed_is_fetched_and_the_rest_is_kept(store):
    old = find()
    store.fetched()
    store.objects["bucket"]["models/tiny/tokenizer.json"] = b'{"new": 1}'
    new = find()
    assert store.fetched() == ["models/tiny/tokenizer.json"]
    assert new != old
    assert (old / "tokenizer.json").read_bytes() == b"{}"
    assert (new / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert (new / "model.safetensors").samefile(old / "model.safetensors")


def test_downloads_go_where_they_are_told(store, tmp_path):
    folder = fetch("*.json", folder=tmp_path / "here")
    assert folder.is_relative_to(tmp_path / "here")
    assert (folder / "onnx" / "model.json").is_file()
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_downloads_nothing(store, tmp_path):
    assert check_remote(configured(), PLUGINS) == []
    assert store.fetched() == []
    assert not (tmp_path / "cache").exists()
    assert "has no weights for --load-format tensorizer" in refused(
        check_remote, configured(load_format="tensorizer"), PLUGINS
    )


def test_a_listing_of_several_pages(store):
    store.page = 2
    assert "config.json" in files(fetch())
    assert len(store.objects["bucket"]) > 2 * store.page


def test_a_public_bucket_needs_no_credentials(store, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "no credentials were found" in refused()
    store.public.add("bucket")
    assert (fetch("*.json") / "config.json").is_file()


@pytest.mark.parametrize("variable", ["RUNAI_STREAMER_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_variables_that_name_the_store(store, monkeypatch, variable):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, store.url)
    assert (fetch("*.json") / "config.json").is_file()


# ------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    ["s3://", "s3://b", "s3:///a", "s3://Bucket/a", "s3://bu..ket/a", "s3://bucket/../a", "s3://bucket/a//b",
     "s3://bucket/a/./b", "s3://bucket/a\nb", "s3://bucket/a\\b", "s3://bucket/" + "a" * 2000, "org/model", "gs://b/a"],
)  # fmt: skip
def test_names_that_are_no_folders_of_buckets(name):
    assert "does not accept this name" in S3().refuses(name)


def test_names_that_are():
    for name in ("s3://bucket", "s3://bucket/", "s3://my.bucket-1/a b/ü/", NAME):
        assert S3().refuses(name) is None
    assert str(stores.place("s3://bucket/a/b/")) == "s3://bucket/a/b"
    assert stores.place("s3://bucket").key("x") == "x"


def test_a_whole_bucket_and_a_folder_whose_name_begins_alike(store):
    assert (fetch("*.json", name="s3://bucket") / "models" / "tiny-2" / "config.json").read_bytes() == b"another"
    assert "has no objects" in refused(name="s3://bucket/models/tin")


def test_large_files_of_folders_within_are_not_the_models(store, monkeypatch):
    monkeypatch.setattr(hub, "_DEEP_BYTES", 10_000)
    assert len(MODEL["models/tiny/model.safetensors"]) > 10_000
    assert "has no config.json" in refused(find, "s3://bucket/models")
    assert "models/tiny/config.json" in store.fetched()
    assert (fetch("*") / "model.safetensors").is_file()
    assert (fetch("*", name="s3://bucket/models") / "tiny" / "model.safetensors").is_file()


def test_there_are_no_revisions(store):
    said = refused(find, revision="v1")
    assert "has no revision 'v1'" in said
    assert store.requests == []


_KEYS = ("../out.json", "a/../../out.json", "/etc/out.json", "a//b.json", "./b.json", "a\\b.json", "\x85.json")


@pytest.mark.advisory("CVE-2024-37032")
@pytest.mark.parametrize("key", [*_KEYS, "x" * 300 + ".json", fetching.LISTING])
def test_keys_that_cannot_be_files(store, tmp_path, key):
    content = listing([("models/tiny/config.json", CONFIG), (f"models/tiny/{key}", b"x")])
    store.listed = lambda prefix: content
    assert "an object whose name cannot be that of a file" in refused(fetch, "*.json")
    assert not (tmp_path / "cache").exists()
    if not key.endswith(fetching.LISTING):
        assert files(fetch("config.json"))  # what is not wanted does not matter


def test_a_file_where_a_folder_must_be(store):
    store.objects["bucket"] |= {"models/tiny/a.json": b"1", "models/tiny/a.json/b.json": b"2"}
    assert "cannot be written to" in refused(fetch, "*.json")


# ------------------------------------------------------------------------------------------ stores that misbehave


def test_listings_without_end(store, monkeypatch):
    page = listing([("models/tiny/a.json", b"x")], "<NextContinuationToken>x</NextContinuationToken>")
    store.listed = lambda prefix: page
    monkeypatch.setattr(stores, "_MAX_PAGES", 10)
    assert "a listing without end" in refused()
    assert len(store.requests) == stores._MAX_PAGES


def test_more_objects_than_a_model_has(store, monkeypatch):
    monkeypatch.setattr(stores, "MAX_OBJECTS", 100)
    store.objects["bucket"] = {f"models/tiny/{index}": b"" for index in range(2000)}
    store.page = 30
    assert "more than 100 objects" in refused()
    assert len(store.requests) == 4


def test_an_object_that_changes_while_it_is_fetched(store):
    def disturb(key):
        if key.endswith("model.safetensors"):
            store.objects["bucket"][key] = save(MORE)

    store.disturb = disturb
    assert "model.safetensors was changed while it was read" in refused()
    assert (fetch() / "model.safetensors").read_bytes() == save(MORE)


def test_an_object_that_goes_away(store):
    store.disturb = lambda key: store.objects["bucket"].pop(key, None) and None
    assert "does not exist, or was removed meanwhile" in refused()


def test_a_connection_that_breaks_off_is_continued(store):
    cuts = {"models/tiny/model.safetensors": [50_000, 20_000]}
    store.disturb = lambda key: cuts[key].pop() if cuts.get(key) else None
    folder = fetch()
    assert (folder / "model.safetensors").read_bytes() == MODEL["models/tiny/model.safetensors"]
    assert store.requests.count(("GET", "bucket/models/tiny/model.safetensors")) == 3


def test_an_object_that_stays_short_and_a_second_start(store):
    store.disturb = lambda key: 60_000 if key.endswith("model.safetensors") else None
    whole = MODEL["models/tiny/model.safetensors"]
    assert len(whole) > 60_000
    store.objects["bucket"]["models/tiny/model.safetensors"] = longer = whole * 5
    assert "model.safetensors" in refused()
    store.requests.clear()
    store.disturb = lambda key: None
    assert (fetch() / "model.safetensors").read_bytes() == longer
    assert store.fetched() == ["models/tiny/model.safetensors"]  # and its beginning is not fetched again
    assert not list(fetch().glob(".*.part"))


def test_an_object_shorter_than_the_listing_says(store):
    content = MODEL["models/tiny/config.json"]
    said = listing([("models/tiny/config.json", content)]).replace(b"<Size>", b"<Size>1")
    store.listed = lambda prefix: said
    assert "config.json is truncated" in refused()


def test_stores_that_are_not_there(store, monkeypatch):
    assert "there is no bucket 'other'" in refused(name="s3://other/a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    assert "credentials are missing or incomplete" in refused() or "no credentials" in refused()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    assert "the credentials do not allow it" in refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{KEY_ID}:{SECRET}@127.0.0.1:9")
    assert "the store at 127.0.0.1:9 cannot be reached" in refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    assert "cannot be fetched" in refused()


def test_answers_that_are_not_of_s3(store):
    store.listed = lambda prefix: b"<html>hello"
    assert "cannot be fetched" in refused()


def test_no_space(store, monkeypatch):
    monkeypatch.setattr(fetching, "_SPARE", 1 << 60)
    assert "of free space" in refused()


def test_two_at_a_time(store):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert store.requests.count(("GET", "bucket/models/tiny/model.safetensors")) == 1


# --------------------------------------------------------------------------------------- weights that are streamed


def sharded(store: FakeS3):
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}
    objects = store.objects["bucket"]
    del objects["models/tiny/model.safetensors"]
    objects["models/tiny/m-1.safetensors"], objects["models/tiny/m-2.safetensors"] = save(WEIGHTS), save(MORE)
    objects["models/tiny/model.safetensors.index.json"] = json.dumps(index).encode()


@pytest.mark.parametrize("shards", [False, True])
def test_weights_are_streamed_and_never_written(store, shards):
    if shards:
        sharded(store)
    folder = find(load_format="runai_streamer")
    assert not list(folder.rglob("*.safetensors"))
    source, wanted = RunaiStreamer(), {**WEIGHTS, **(MORE if shards else {})}
    assert source.shapes(folder, {}) == {name: tuple(value.shape) for name, value in wanted.items()}
    found = load(source, folder, concurrency=2)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert source.place == str(folder)
    assert not list(folder.rglob("*.safetensors"))
    assert find() == folder  # the same model, downloaded
    assert load(Safetensors(), folder).keys() == wanted.keys()
    store.requests.clear()
    assert load(RunaiStreamer(), folder).keys() == wanted.keys()
    assert store.requests == []


def test_streamed_weights_that_are_damaged_or_change(store):
    objects, key = store.objects["bucket"], "models/tiny/model.safetensors"
    folder = find(load_format="runai_streamer")
    objects[key] = save(MORE)
    assert "was changed while it was read" in refused(load, RunaiStreamer(), folder)
    objects[key] = MODEL[key][:-1]
    assert "is truncated" in refused(load, RunaiStreamer(), find(load_format="runai_streamer"))
    objects[key] = b"\xff" * 100
    assert "is not a safetensors file" in refused(load, RunaiStreamer(), find(load_format="runai_streamer"))
    del objects[key]
    assert "has no .safetensors file" in refused(load, RunaiStreamer(), find(load_format="runai_streamer"))
    sharded_index = {"weight_map": {"a": "gone.safetensors"}}
    objects["models/tiny/model.safetensors.index.json"] = json.dumps(sharded_index).encode()
    assert "gone.safetensors is missing" in refused(load, RunaiStreamer(), find(load_format="runai_streamer"))


def test_a_listing_that_was_damaged(store):
    folder = find(load_format="runai_streamer")
    for text in ("{}", '{"bucket": "b", "prefix": "", "objects": {"a": 1}}', "x"):
        (folder / fetching.LISTING).write_text(text)
        assert fetching.LISTING in refused(load, RunaiStreamer(), folder)


def test_two_that_fetch_the_same_wait_for_each_other(store, caplog):
    caplog.set_level("INFO")
    folder = find()
    with (folder / ".ferrule-s3.lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = pool.submit(find)
        while "waiting for another process" not in caplog.text and not second.done():
            time.sleep(0.01)
        assert not second.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.result() == folder


def test_a_listing_that_came_with_a_model_names_no_bucket(store, tmp_path):
    """Do not ask the store for a copy of a fetched folder, or for one whose listing was changed."""
    fetched = find(load_format="runai_streamer")
    shutil.copytree(fetched, tmp_path / "model")
    assert fetching.remote(fetched) is not None
    assert fetching.remote(tmp_path / "model") is None
    listing = fetched / fetching.LISTING
    listing.write_text(listing.read_text().replace('"bucket"', '"x"', 1).replace('"x": "bucket"', '"bucket": "others"'))
    assert fetching.remote(fetched) is None


# ------------------------------------------------------------------------------------------------- one object


def test_a_tensorizer_file_of_a_store(store, tmp_path, monkeypatch):
    write(tmp_path / "x.tensors", WEIGHTS)
    content = (tmp_path / "x.tensors").read_bytes()
    store.objects["bucket"]["models/v1/model.tensors"] = content
    settings = {"tensorizer_dir": "s3://bucket/models/v1"}
    assert load(Tensorizer(), tmp_path, **settings).keys() == WEIGHTS.keys()
    assert Tensorizer().shapes(tmp_path, settings) is None
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = {"s3_access_key_id": KEY_ID, "s3_secret_access_key": SECRET, "s3_endpoint": store.url}
    assert load(Tensorizer(), tmp_path, **settings, **keys).keys() == WEIGHTS.keys()
    for name, value in zip(
        ("S3_ENDPOINT_URL", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"), (store.url, KEY_ID, SECRET), strict=True
    ):
        monkeypatch.setenv(name, value)
    assert load(Tensorizer(), tmp_path, **settings).keys() == WEIGHTS.keys()
    assert store.requests.count(("GET", "bucket/models/v1/model.tensors")) == 1
    assert "does not exist" in refused(load, Tensorizer(), tmp_path, tensorizer_uri="s3://bucket/models/none")
    assert "is not the address of an object" in refused(load, Tensorizer(), tmp_path, tensorizer_uri="s3://bucket/")
    assert etag(content) in (next((tmp_path / "cache").rglob(fetching.LISTING))).read_text().replace('\\"', '"')


def test_the_library_is_missing(store, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    assert 'pip install "ferrule[s3]"' in refused()


def test_errors_of_the_disk_are_not_those_of_the_store(store, monkeypatch):
    monkeypatch.setattr(fetching, "_append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="cannot be written to .*No space left"):
        fetch()
