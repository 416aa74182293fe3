"""`ferrule models`: the known architectures, and whether and how one checkpoint would run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.config.places import placed
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_files import commands

_ABOUT = (
    "Without a name, list the architectures that Ferrule implements and those that run through transformers. With the "
    "folder or hub id of a model, say whether and how it would run here: from its config.json alone, without weights."
)
_TAKEN = {  # sections of `Config`, and what decides how a model runs
    "model": (
        "model",
        "dtype",
        "revision",
        "hub",
        "hf_token",
        "hf_config_path",
        "config_format",
        "hf_overrides",
        "model_impl",
        "trust_remote_code",
        "max_model_len",
    ),
    "scheduler": ("max_num_seqs",),
    "plugins": ("plugins_allow", "plugins_deny", "plugins_prefer", "plugin"),
}
_SAID: Mapping[str, Mapping[str, Any]] = {"model": {"doc": "Folder or hub id of a model."}}


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of `ferrule models`."""

    json: bool = opt(False, "Print JSON.", common=True)


class ModelsCommand(Command):
    summary = "List architectures, or say whether and how a model would run here."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """List the architectures, or describe one model. Returns 0; 1 for a model that would not run.

        Raises StartupError for a model that is not found.
        """
        sections = {**commands.sections(_TAKEN, _SAID), "show": ModelsOptions}
        usage = CommandUsage("ferrule models", _ABOUT, "model")
        parsed = parse_command(argv, usage, plugins, sections=sections, server=False)
        if parsed is None:
            return 0
        config = commands.whole(parsed.config, _TAKEN)
        from ferrule.launch.prepare import prepare
        from ferrule_plugins.command.models.report import list_architectures, show

        resolved, chosen = prepare(config, parsed.notices, plugins, "models")
        if not config.model.model:
            return list_architectures(chosen, as_json=parsed.extra["show"].json)
        with placed(config):
            return show(resolved, chosen, as_json=parsed.extra["show"].json)
