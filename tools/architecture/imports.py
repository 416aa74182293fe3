"""Who may import whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from ferrule_testkit.public import may_import
from tools.architecture.source import Import, Module, Rule, Violation

# Bottom first: a module of core imports from its own layer and the ones before it.
LAYERS = (
    ("types", "forms", "alike", "errors", "extras", "env_vllm", "env", "log", "slow_start"),
    ("plugin",),
    ("config", "checkpoint", "rotary", "small_files", "unread", "yaml_text"),
    ("schema",),
    ("structured_outputs",),
    ("sampling_params",),
    ("interfaces",),
    ("hooks",),
    ("locate",),
    ("wire",),
    ("shared_memory",),
    ("api_keys",),
    ("engine",),
    ("live",),
    ("runner",),
    ("assembly",),
    ("execution",),
    ("client",),
    ("frontend",),
    ("api",),
    ("launch",),
    ("llm",),
    ("", "__main__"),  # the package itself, which lends its public names lazily
)
_WITH_TORCH = {"interfaces", "runner", "assembly", "execution"}  # interfaces for type hints only
NO_TORCH = frozenset(part for layer in LAYERS for part in layer) - _WITH_TORCH
TORCH = ("torch", "torchvision", "torchaudio", "triton", "safetensors.torch")
# The engine is a function of what it is given.
NOT_IN_ENGINE = ("time", "datetime", "random", "secrets", "socket", "zmq", "asyncio", "subprocess", "numpy")
ONLY_IN: Mapping[str, str] = {"pluggy": "core/ferrule/hooks.py"}
# Import packages that stand on the core.
_SDKS = ("ferrule_files", "ferrule_nn", "ferrule_parsing", "ferrule_protocol", "ferrule_quant")
_BUILT_IN = ("ferrule_contrib", "ferrule_kernels", "ferrule_plugins")
_DISTRIBUTIONS = ("ferrule_quantize", "ferrule_tensorizer", "ferrule_tgi")
_BESIDE = (*_SDKS, *_DISTRIBUTIONS, "ferrule_plugins", "ferrule_contrib", "ferrule_testkit", "tools")
# What is built in keeps to what strangers may import, but for these files, or folders, and what they need.
_INSIDE: Mapping[str, str] = {
    "plugins/ferrule_plugins/command/": "",  # the program itself: it starts processes, converts, measures
    "plugins/ferrule_plugins/scheduler/default.py": "ferrule.engine.scheduler",  # the engine's own, under a name
}
HTTP_CLIENTS = ("requests", "httpx", "aiohttp", "urllib.request", "urllib3")


def layer_order(modules: Sequence[Module]) -> list[Violation]:
    """Check that a module of core imports no later layer, not for type hints and not inside functions either."""
    known = {module.name for module in modules}
    found = []
    for module in modules:
        if not module.core:
            continue
        own = _layer(module.name)
        for target, imported in _targets(module, known):
            if target.partition(".")[0] != "ferrule" or _only_version(target, imported, known):
                continue
            other = _layer(target)
            if other is None or own is None:
                found.append(Violation(module.path, imported.line, f"{target} is in no layer"))
            elif other > own:
                found.append(Violation(module.path, imported.line, f"imports {target}, a later layer"))
    return found


def core_stands_alone(modules: Sequence[Module]) -> list[Violation]:
    """Check that core imports no package beside it, kernels nothing of Ferrule, no package the tools, and none of this
    distribution another distribution.
    """
    found = []
    for module in modules:
        if module.core:
            banned: tuple[str, ...] = (*_BESIDE, "ferrule_kernels")
        elif module.package == "ferrule_kernels":
            banned = (*_BESIDE, "ferrule")
        elif module.package != "tools":
            banned = ("tools", *(name for name in _DISTRIBUTIONS if name != module.package))
        else:
            continue
        found += _banned(module, banned, f"{module.package} must not import")
    return found


def no_cycles(modules: Sequence[Module]) -> list[Violation]:
    """Check that there is no cycle among imports of any sort. Returns one violation per group of modules that reach
    each other.
    """
    known = {module.name for module in modules}
    graph = {m.name: {t for t, _ in _targets(m, known) if t in known and t != m.name} for m in modules}
    return _cycles("import cycle", graph, modules)


def package_cycles(modules: Sequence[Module]) -> list[Violation]:
    """Check that the members of a package, its modules and packages, import each other without a cycle, at every level.

    An import counts for the two members of the smallest package that has both of its ends. Between a package and its
    own members there is none: a package may lend names of theirs.
    """
    known = {module.name for module in modules}
    levels: dict[str, dict[str, set[str]]] = {}
    for module in modules:
        for target, _ in _targets(module, known):
            if target in known and (ends := _members(module.name, target)):
                package, importer, imported = ends
                graph = levels.setdefault(package, {})
                graph.setdefault(importer, set()).add(imported)
                graph.setdefault(imported, set())
    return [violation for graph in levels.values() for violation in _cycles("cycle of packages", graph, modules)]


def no_torch(modules: Sequence[Module]) -> list[Violation]:
    """Check that layers without torch do not name it at all; interfaces name it for type hints only."""
    found = []
    for module in modules:
        if not module.core:
            continue
        part = module.name.partition(".")[2].partition(".")[0]
        for imported in module.imports:
            banned = part in NO_TORCH or (part == "interfaces" and imported.when != "typing")
            if banned and _is(imported, TORCH):
                found.append(Violation(module.path, imported.line, f"imports {imported.target} in {part}"))
    return found


def no_torch_on_import(modules: Sequence[Module]) -> list[Violation]:
    """Check that importing a module of the layers without torch does not import torch through other modules."""
    known = {module.name: module for module in modules}
    edges = {m.name: [(t, i) for t, i in _targets(m, set(known)) if i.when == "import"] for m in modules}
    heavy = {m.name for m in modules if any(i.when == "import" and _is(i, TORCH) for i in m.imports)}
    found = []
    for module in modules:
        part = module.name.partition(".")[2].partition(".")[0]
        if not module.core or part not in NO_TORCH | {"interfaces"}:
            continue
        for target, imported in edges[module.name]:
            chain = _path_to(target, heavy, edges)
            if chain:
                found.append(Violation(module.path, imported.line, f"imports torch through {' → '.join(chain)}"))
    return found


def engine_is_pure(modules: Sequence[Module]) -> list[Violation]:
    """Check that the engine gets clock, randomness and sockets as arguments."""
    return [
        violation
        for module in modules
        if module.name.startswith("ferrule.engine")
        for violation in _banned(module, NOT_IN_ENGINE, "the engine must not import")
    ]


def one_place_each(modules: Sequence[Module]) -> list[Violation]:
    """Check that some libraries have one user."""
    return [
        violation
        for module in modules
        for library, path in ONLY_IN.items()
        if module.path != path
        for violation in _banned(module, (library,), f"only {path} imports")
    ]


def public_imports(modules: Sequence[Module]) -> list[Violation]:
    """Check that plugins import nothing of the core and of the SDKs that plugins of others may not.

    `ferrule_kernels` and `ferrule_plugins` belong to the built-in ones, as another distribution has modules of its
    own; the other distributions of this repository are strangers to them.
    """
    own = {**dict.fromkeys(("ferrule_plugins", "ferrule_contrib"), ()), **dict.fromkeys(_DISTRIBUTIONS, _BUILT_IN)}
    return [
        Violation(module.path, imported.line, f"imports {'.'.join(filter(None, (imported.target, name)))}, private")
        for module in modules
        if module.package in own
        for imported in module.imports
        if _is(imported, ("ferrule", *_SDKS, *own[module.package])) and not _is_inside(module, imported)
        for name in imported.names or ("",)
        if not may_import(imported.target, name)
    ]


def _is_inside(module: Module, imported: Import) -> bool:
    return any(module.path.startswith(path) and imported.target.startswith(what) for path, what in _INSIDE.items())


def no_http_client_in_core(modules: Sequence[Module]) -> list[Violation]:
    """Check that core downloads nothing by itself; downloads go through huggingface_hub."""
    return [v for m in modules if m.core for v in _banned(m, HTTP_CLIENTS, "core must not import")]


IMPORT_RULES: dict[str, Rule] = {
    "layer-order": layer_order,
    "core-stands-alone": core_stands_alone,
    "no-cycles": no_cycles,
    "package-cycles": package_cycles,
    "no-torch": no_torch,
    "no-torch-on-import": no_torch_on_import,
    "engine-is-pure": engine_is_pure,
    "one-place-each": one_place_each,
    "public-imports": public_imports,
    "no-http-client-in-core": no_http_client_in_core,
}


# ---------------------------------------------------------------------------------------------- parts


def _layer(name: str) -> int | None:
    part = name.partition(".")[2].partition(".")[0]
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def _only_version(target: str, imported: Import, known: set[str]) -> bool:
    """Return whether an import such as ``from ferrule import __version__, log`` gets only the version, besides modules,
    from the package itself.
    """
    return target == "ferrule" and all(n == "__version__" or f"ferrule.{n}" in known for n in imported.names or ("",))


def _targets(module: Module, known: set[str]) -> Iterator[tuple[str, Import]]:
    """Yield the modules that an import reaches: of ``from a import b``, a.b where that is a module, else a."""
    for imported in module.imports:
        inner = [f"{imported.target}.{name}" for name in imported.names if f"{imported.target}.{name}" in known]
        for target in inner:
            yield target, imported
        if not imported.names or len(inner) < len(imported.names):
            yield imported.target, imported


def _members(importer: str, imported: str) -> tuple[str, str, str] | None:
    """Return the smallest package that has both modules, and its members on either side; None if one has the other."""
    ends = importer.split("."), imported.split(".")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)))
    if shared in map(len, ends):
        return None
    first, second = (".".join(end[: shared + 1]) for end in ends)
    return ".".join(ends[0][:shared]), first, second


def _cycles(what: str, graph: Mapping[str, set[str]], modules: Sequence[Module]) -> list[Violation]:
    paths = {module.name: module.path for module in modules}
    return [
        Violation(paths.get(group[0], group[0]), 1, f"{what}: {' → '.join([*_round_trip(graph, group), ''])}…")
        for group in _components(graph)
        if len(group) > 1
    ]


def _is(imported: Import, libraries: Sequence[str]) -> bool:
    reached = [imported.target, *(f"{imported.target}.{name}" for name in imported.names)]
    return any(name == lib or name.startswith(lib + ".") for name in reached for lib in libraries)


def _banned(module: Module, libraries: Sequence[str], sentence: str) -> list[Violation]:
    return [
        Violation(module.path, imported.line, f"{sentence} {imported.target}")
        for imported in module.imports
        if _is(imported, libraries)
    ]


def _path_to(start: str, goals: set[str], edges: Mapping[str, list[tuple[str, Import]]]) -> list[str]:
    """Return a chain of import-time imports from `start` to one of `goals`, or an empty list."""
    chains, seen = [[start]], {start}
    for chain in chains:
        if chain[-1] in goals:
            return chain
        for target, _ in edges.get(chain[-1], ()):
            if target not in seen:
                seen.add(target)
                chains.append([*chain, target])
    return []


def _components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph (Tarjan 1972), with an explicit stack."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    for root in graph:
        work = [(root, iter(sorted(graph[root])))] if root not in index else []
        if work:
            index[root] = low[root] = len(index)
            stack.append(root)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    groups.append(sorted(stack[at:]))
                    del stack[at:]
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                work.append((target, iter(sorted(graph[target]))))
            elif target in stack:
                low[node] = min(low[node], index[target])
    return groups


def _round_trip(graph: Mapping[str, set[str]], group: list[str]) -> list[str]:
    """Return a shortest cycle through the first module of the group."""
    first = group[0]
    chains = [[first]]
    seen: set[str] = set()
    for chain in chains:
        for target in sorted(graph[chain[-1]] & set(group)):
            if target == first:
                return [*chain, first]
            if target not in seen:
                seen.add(target)
                chains.append([*chain, target])
    return [first]
