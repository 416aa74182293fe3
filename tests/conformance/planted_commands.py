"""Commands with planted faults, and good ones. Their kit sees what their module imports: this one imports little."""

from __future__ import annotations

import argparse
import os
import sys
from typing import ClassVar

from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command


class HeavyHelp(Command):
    summary = "Heavy."

    def run(self, argv, plugins):
        import numpy  # noqa: F401

        print("usage")
        return 0


class TracebackForFlags(Command):
    summary = "Odd."

    def run(self, argv, plugins):
        if argv[0] not in ("-h", "--help"):
            raise KeyError(argv[0])
        print("usage")
        return 0


class FlagsAreIgnored(Command):
    summary = "Odd."

    def run(self, argv, plugins):
        print("usage")
        return 0


class ExitsItself(Command):
    summary = "Odd."

    def run(self, argv, plugins):
        print("usage", flush=True)
        os._exit(3)


class OnSubCommands(Command):
    """The way of argparse's manual: sub-commands, each with its function, and SystemExit for help and errors."""

    summary = "Work with numbers."

    def run(self, argv, plugins):
        parser = argparse.ArgumentParser(prog="ferrule numbers", description=self.summary)
        commands = parser.add_subparsers(required=True)
        add = commands.add_parser("add", help="add numbers")
        add.add_argument("number", nargs="*", type=int)
        add.set_defaults(func=self.add)
        args = parser.parse_args(argv)
        return args.func(args)

    def add(self, args):
        print(sum(args.number))
        return 0


class OnSubCommandsInFull(OnSubCommands):
    conformance: ClassVar = {"arguments": ("add",)}


class HeavySubCommands(OnSubCommands):
    def run(self, argv, plugins):
        import numpy  # noqa: F401

        return super().run(argv, plugins)


class ExitsWithAWord(Command):
    summary = "Odd."

    def run(self, argv, plugins):
        sys.exit("usage")


class HidesTheFlag(Command):
    summary = "Odd."

    def run(self, argv, plugins):
        if list(argv) not in (["-h"], ["--help"]):
            raise ConfigError("These arguments are wrong.")
        print("usage")
        return 0
