"""Adapters as options name them, and contradictions among their options. Pure, as all of `resolve`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ferrule.config.resolved import LoRAModule, PromptAdapter, ResolvedLoRA, ResolvedPromptAdapters
from ferrule.config.sections import LoRAConfig, ModelConfig, PromptAdapterConfig
from ferrule.errors import nearest
from ferrule.types import Adapter

MAX_NAME = 256  # characters of an adapter's name
_KEYS = ("name", "path", "local_path", "base_model_name")


def name_problem(name: str) -> str:
    """Return what is wrong with an adapter's name, as the end of a sentence that begins with it; "" for nothing."""
    if not name or name != name.strip() or not name.isprintable():
        return "must be printable, without spaces at its ends"
    if "," in name:
        return "may not have commas, which stand between names in metrics"
    return f"may have at most {MAX_NAME} characters" if len(name) > MAX_NAME else ""


def read_module(text: str) -> LoRAModule:
    """Read an entry of --lora-modules, name=path or a JSON object. Raises ValueError."""
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not equals:
            raise ValueError("expected name=path or a JSON object")
        return _checked(name.strip(), path.strip(), None)
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    for key, value in given.items():
        if key not in _KEYS:
            raise ValueError(f"it has no key {key!r:.80}; it has name, path, base_model_name.{nearest(key, _KEYS)}")
        if not (isinstance(value, str) or (key == "base_model_name" and value is None)):
            raise ValueError(f"{key} must be a text")
    if "path" in given and "local_path" in given:
        raise ValueError("path and its older name local_path are both there")
    path = given.get("path", given.get("local_path", ""))
    return _checked(given.get("name", ""), path, given.get("base_model_name"))


def _checked(name: str, path: str, base: str | None) -> LoRAModule:
    if problem := name_problem(name):
        raise ValueError(f"its name {name!r:.80} {problem}")
    if not path:
        raise ValueError(f"the adapter {name!r:.80} has no path")
    return LoRAModule(name=name, path=path, base_model_name=base)


def resolve_lora(section: LoRAConfig, model: ModelConfig, problems: list[str]) -> ResolvedLoRA:
    """Fill the section of adapters, and add its contradictions to `problems`."""
    slots = section.max_loras
    host = slots if section.max_cpu_loras is None else section.max_cpu_loras
    if host < slots:
        problems.append(f"--max-cpu-loras ({host}) must be at least --max-loras ({slots}).")
    if section.lora_modules and not section.enable_lora:
        problems.append("--lora-modules needs --enable-lora.")
    modules: list[LoRAModule] = []
    for text in section.lora_modules:
        try:
            modules.append(read_module(text))
        except ValueError as error:
            said = str(error)
            problems.append(f"--lora-modules {text!r:.120}: {said}{'' if said.endswith('?') else '.'}")
    problems += _clashes(modules, model.served_model_name or (model.model,))
    values: dict[str, Any] = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    repositories = tuple(
        name.strip() for text in section.lora_resolver_hf_repo_list for name in text.split(",") if name.strip()
    )
    values |= {"max_cpu_loras": host, "modules": tuple(modules), "lora_resolver_hf_repo_list": repositories}
    return ResolvedLoRA(**values)


def _clashes(modules: Sequence[LoRAModule], served: Sequence[str]) -> Iterator[str]:
    seen: set[str] = set()
    for module in modules:
        if module.name in served:
            yield f"--lora-modules: {module.name!r:.80} is the name of the model; an adapter needs another one."
        if module.name in seen:
            yield f"--lora-modules has the name {module.name!r:.80} twice."
        seen.add(module.name)
        if module.base_model_name is not None and module.base_model_name not in served:
            yield (
                f"--lora-modules: the base model of {module.name!r:.80} is {module.base_model_name!r:.80}; served is "
                f"{', '.join(served)}."
            )


def first_adapters(section: ResolvedLoRA) -> list[Adapter]:
    """Return the adapters of --lora-modules. Every process gives them the same identities."""
    return [Adapter(name=f"{module.name}@start", path=module.path, served=module.name) for module in section.modules]


def lora_remarks(section: LoRAConfig) -> Iterator[str]:
    """Yield sentences about options of adapters that have no effect on a server without them."""
    if section.enable_lora:
        return
    default = dataclasses.replace(LoRAConfig(), max_cpu_loras=section.max_loras)
    for field in dataclasses.fields(default):
        if getattr(section, field.name) != getattr(default, field.name):
            yield f"--{field.name.replace('_', '-')} changes nothing without --enable-lora."


def resolve_prompt_adapters(
    section: PromptAdapterConfig, taken: Sequence[str], problems: list[str]
) -> ResolvedPromptAdapters:
    """Fill the section of prompt adapters, and add its contradictions to `problems`. `taken` are other names that
    clients use as a model.
    """
    if section.prompt_adapters and not section.enable_prompt_adapter:
        problems.append("--prompt-adapters needs --enable-prompt-adapter.")
    if section.enable_prompt_adapter and not section.max_prompt_adapter_token:
        problems.append(
            "--enable-prompt-adapter needs --max-prompt-adapter-token, the most virtual tokens of an adapter."
        )
    modules: dict[str, PromptAdapter] = {}
    for text in section.prompt_adapters:
        name, _, path = (part.strip() for part in text.partition("="))
        if not path:
            problems.append(f"--prompt-adapters {text!r:.120}: expected name=path.")
        elif problem := name_problem(name):
            problems.append(f"--prompt-adapters {text!r:.120}: its name {problem}.")
        elif name in taken or name in modules:
            problems.append(f"--prompt-adapters: another model or adapter has the name {name!r:.80}.")
        modules[name] = PromptAdapter(name=name, path=path)
    values: dict[str, Any] = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return ResolvedPromptAdapters(**values, modules=tuple(modules.values()))


def prompt_adapter_remarks(section: PromptAdapterConfig) -> Iterator[str]:
    """Yield sentences about options of prompt adapters that have no effect on a server without them."""
    if section.enable_prompt_adapter:
        return
    for field in dataclasses.fields(PromptAdapterConfig):
        if getattr(section, field.name) != field.default:
            yield f"--{field.name.replace('_', '-')} changes nothing without --enable-prompt-adapter."
