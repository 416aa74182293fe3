"""Adapters of offline requests: one, one for each prompt, several ways to call the engine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ferrule import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from ferrule.errors import RequestError
from tests.fakes import drafts
from tests.fakes.lora_files import merged, write_adapter

PROMPT = "The quick brown fox"
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [write_adapter(tiny_llama, root / name, seed) for seed, name in enumerate(("a", "b", "c"), 1)]
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]


@pytest.fixture(scope="module")
def said(tiny_llama: Path, adapters: list[LoRARequest], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what the model says without an adapter, and with each merged into it."""
    root = tmp_path_factory.mktemp("merged")
    folders = [tiny_llama, *(merged(tiny_llama, Path(one.path), root / one.name) for one in adapters)]
    found = []
    for folder in folders:
        with LLM(str(folder), **OPTIONS) as llm:
            found.append(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text)
    assert len(set(found)) == len(found)
    return found


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), enable_lora=True, max_loras=1, max_cpu_loras=2, **OPTIONS) as llm:
        yield llm


def test_one_adapter_or_one_for_each_prompt(llm: LLM, adapters: list[LoRARequest], said: list[str]) -> None:
    """One slot is enough: adapters take turns in it."""
    (output,) = llm.generate(PROMPT, GREEDY, lora_request=adapters[1], use_tqdm=False)
    assert output.outputs[0].text == said[2]
    asked = [None, *adapters, adapters[0], None]
    outputs = llm.generate([PROMPT] * len(asked), GREEDY, lora_request=asked, use_tqdm=False)
    assert [one.outputs[0].text for one in outputs] == [*said, said[1], said[0]]
    assert llm.list_loras() == {1, 2, 3}
    assert llm.add_lora(adapters[0])
    assert (llm.remove_lora(3), llm.remove_lora(3)) == (True, False)
    assert llm.list_loras() == {1, 2}


def test_steps_conversations_and_beams(llm: LLM, adapters: list[LoRARequest], said: list[str]) -> None:
    engine = llm.llm_engine
    engine.add_request("x", PROMPT, GREEDY, lora_request=adapters[0])
    engine.add_request("y", PROMPT, GREEDY)
    texts = {}
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
    assert texts == {"x": said[1], "y": said[0]}
    talk = [{"role": "user", "content": "hello"}]
    chats = [llm.chat(talk, GREEDY, use_tqdm=False, lora_request=one)[0].outputs[0].text for one in (None, adapters[0])]
    assert chats[0] != chats[1]
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    beams = [llm.beam_search([PROMPT], params, lora_request=one)[0].sequences[0].text for one in (None, *adapters)]
    assert len(set(beams)) > 1


async def test_async(tiny_llama: Path, adapters: list[LoRARequest], said: list[str]) -> None:
    with AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_llama), enable_lora=True, **OPTIONS)) as llm:
        assert await llm.add_lora(adapters[1])
        async for output in llm.generate(PROMPT, GREEDY, "a", lora_request=adapters[0]):
            last = output
        assert last.outputs[0].text == said[1]
        assert await llm.list_loras() == {1, 2}
        assert await llm.remove_lora(1)


def test_an_adapter_is_replaced_in_place(llm: LLM, adapters: list[LoRARequest], said: list[str]) -> None:
    def text(request: LoRARequest) -> str:
        return llm.generate(PROMPT, GREEDY, lora_request=request, use_tqdm=False)[0].outputs[0].text

    assert text(LoRARequest("swapped", 9, adapters[0].path)) == said[1]
    with pytest.raises(RequestError, match="loaded already"):
        text(LoRARequest("swapped", 9, adapters[1].path))
    assert text(LoRARequest("swapped", 9, adapters[1].path, load_inplace=True)) == said[2]
    assert llm.remove_lora(9)


def test_a_pinned_adapter_stays_on_the_device(tiny_llama: Path, adapters: list[LoRARequest], said: list[str]) -> None:
    def slots() -> set[str]:
        return set(llm._backend.client.loop.preparing.loaded())  # type: ignore[attr-defined]

    def ask(adapter: LoRARequest) -> str:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=adapter)[0].outputs[0].text

    one, two, three = adapters
    with LLM(str(tiny_llama), enable_lora=True, max_loras=2, max_cpu_loras=4, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="No adapter with the lora_int_id 1"):
            llm.pin_lora(1)
        for adapter in (one, two, three):
            llm.add_lora(adapter)
        assert llm.pin_lora(1)
        assert llm.pin_lora(1)  # again
        for adapter in (two, three, two, three):
            assert ask(adapter) == said[adapter.lora_int_id]
            assert slots() == {one.lora_name, adapter.lora_name}
        assert llm.llm_engine.pin_lora(3)
        for refused in (lambda: llm.pin_lora(2), lambda: ask(two)):
            with pytest.raises(RequestError, match="Every slot for adapters .* has a pinned one"):
                refused()
        assert ask(one) == said[1]
        assert llm.remove_lora(1)
        assert ask(two) == said[2]
        assert slots() == {two.lora_name, three.lora_name}
        assert ask(replace(three, load_inplace=True)) == said[3]  # read again, it stays pinned
        assert [ask(two), ask(one)] == [said[2], said[1]]
        assert slots() == {one.lora_name, three.lora_name}


def test_what_is_refused(llm: LLM, adapters: list[LoRARequest], tiny_llama: Path, tmp_path: Path) -> None:
    wrong = {
        "the adapter 'a'": LoRARequest("other", 1, adapters[0].path),
        "The adapter 'a' has the lora_int_id 1": LoRARequest("a", 5, adapters[0].path),
        "a name of the model": LoRARequest(str(tiny_llama), 5, adapters[0].path),
        "base_model_name must be": LoRARequest("other", 5, adapters[0].path, base_model_name="else"),
        "is not a folder": LoRARequest("other", 5, str(tmp_path / "nowhere")),
        "cannot be loaded": LoRARequest("other", 5, str(tmp_path)),
        "must be a LoRARequest": "a",
    }
    for said, request in wrong.items():
        with pytest.raises(RequestError, match=said) as caught:
            llm.generate(PROMPT, GREEDY, lora_request=request, use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.param == "lora_request"
    with pytest.raises(RequestError, match="Each prompt needs one lora_request"):
        llm.generate([PROMPT], GREEDY, lora_request=[None, None], use_tqdm=False)
    for fields in (("a", 0, "x"), ("a", True, "x"), ("a", 1), (1, 1, "x")):
        with pytest.raises(RequestError):
            LoRARequest(*fields)  # type: ignore[arg-type]
    assert 5 not in llm.list_loras()


def test_without_adapters_they_are_refused(tiny_llama: Path, adapters: list[LoRARequest]) -> None:
    with LLM(str(tiny_llama), **OPTIONS) as llm, pytest.raises(RequestError, match="--enable-lora"):
        llm.generate(PROMPT, GREEDY, lora_request=adapters[0], use_tqdm=False)


@pytest.mark.parametrize("write", [drafts.medusa, drafts.eagle, drafts.eagle3])
def test_heads_that_call_parts_of_the_model_guess_for_all(
    tiny_llama: Path, adapters: list[LoRARequest], said: list[str], tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    write(tmp_path, tiny_llama)
    settings = {"method": write.__name__, "model": str(tmp_path), "num_speculative_tokens": 2, "adaptive": False}
    with LLM(str(tiny_llama), enable_lora=True, max_loras=3, speculative_config=settings, **OPTIONS) as llm:
        outputs = llm.generate([PROMPT] * 4, GREEDY, lora_request=[None, *adapters], use_tqdm=False)
    assert [one.outputs[0].text for one in outputs] == said
