"""The command `cellserve` and its subcommands. Parses, and says in one line what a user got wrong.

Flags and their help are made from the fields of `Settings`. Exit codes: server/run.py.

A command imports what it needs when it runs: `serve` spawns the engine's process, whose imports take longest, before it
imports the rest of the server.
"""

from __future__ import annotations

import argparse
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.errors import CellserveError, ConfigError, ModelError
from server import run, settings
from server.options import ENV_PREFIX, Group, flag_name, option
from server.settings import Settings

_GROUPS: tuple[Group, ...] = ("model", "cache", "scheduling", "API", "limits")
_EPILOG = (
    f"Each option is also an environment variable ({ENV_PREFIX}MAX_MODEL_LEN) and a key of the --config file"
    " (max_model_len). A flag wins over the environment, that over the file, that over the default."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing a user can cause ends in a traceback."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        commands = {
            "serve": _serve,
            "show-config": _show_config,
            "doctor": _doctor,
            "chat": _chat,
            "batch": _batch,
            "bench": _bench,
            "kv": _kv,
            "version": _version,
        }
        return commands[args.command](args)
    except ConfigError as error:
        return _fail(error, run.EXIT_USAGE)
    except CellserveError as error:
        return _fail(error, run.EXIT_MODEL)
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigError; --help ends the process, as everywhere."""
    parser = build_parser(argv[0] if argv else None)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        command = _command_parser(parser, args.command)
        raise ConfigError(f"unknown option {name}{settings.suggest(name, command.flags())}")
    return args


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given as flags, as text: what `settings.load` takes."""
    return {field: value for field, value in vars(args).items() if field in Settings.model_fields}


def build_parser(asked: str | None) -> Parser:
    """Every command, and the arguments of the one that is asked for: others' would be imports for nothing."""
    parser = Parser(prog="cellserve", description="A batching LLM inference server.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (text, epilog, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=epilog, allow_abbrev=False)
        if name == asked:
            add_arguments(command)
    return parser


class Parser(argparse.ArgumentParser):
    """argparse, whose complaints are our one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def flags(self) -> Iterator[str]:
        """Every flag of this parser and of its commands."""
        for action in self._actions:
            yield from (name for name in action.option_strings if name.startswith("--"))


def _command_parser(parser: Parser, command: str) -> Parser:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = next(actions).choices[command]
    assert isinstance(found, Parser)
    return found


def _add_options(parser: Parser, *, is_model_positional: bool = True) -> None:
    groups = {name: parser.add_argument_group(name) for name in _GROUPS}
    kind: dict[str, Any] = {"nargs": "?"} if is_model_positional else {}
    name = "model" if is_model_positional else "--model"
    groups["model"].add_argument(name, metavar="MODEL", default=argparse.SUPPRESS, help=_help("model"), **kind)
    for field, info in Settings.model_fields.items():
        if field == "model":
            continue
        # Values stay text here: one place, `settings.load`, says what is wrong with any of them.
        kind = {"metavar": _metavar(info)}
        if info.annotation is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(info.default, tuple) or field == "widths":
            kind["action"] = "append"
        group = groups[option(field).group]
        group.add_argument(flag_name(field), default=argparse.SUPPRESS, help=_help(field), **kind)
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file of options")


def _chat_arguments(parser: Parser) -> None:
    from server import terminal_chat

    terminal_chat.add_arguments(parser)


def _batch_arguments(parser: Parser) -> None:
    from server import batch

    batch.add_arguments(parser)
    _add_options(parser, is_model_positional=False)


def _bench_arguments(parser: Parser) -> None:
    from server import bench

    bench.add_arguments(parser)


def _kv_arguments(parser: Parser) -> None:
    from server import kv_command

    kv_command.add_arguments(parser)


_COMMANDS: dict[str, tuple[str, str | None, Callable[[Parser], None]]] = {
    "serve": ("load a model and answer requests", _EPILOG, _add_options),
    "show-config": ("print every option of serve, its value and where that came from", _EPILOG, _add_options),
    "doctor": ("check whether this machine can serve a model with these options", _EPILOG, _add_options),
    "chat": ("talk with a running server", None, _chat_arguments),
    "batch": ("answer a file of requests, by a running server or by a model loaded for it", _EPILOG, _batch_arguments),
    "bench": ("measure a running server", None, _bench_arguments),
    "kv": ("show where a running server's K/V is", None, _kv_arguments),
    "version": ("print the version", None, lambda parser: None),
}
"""What each is for, what its help ends with, and its arguments."""


def _help(field: str) -> str:
    """Description, default, range and unit; argparse reads % as its own."""
    info = Settings.model_fields[field]
    notes = [option(field).unit, _range(info)]
    if info.default not in (None, ()) and info.annotation is not bool and field != "model":
        notes.append(f"default {info.default}")
    noted = ", ".join(note for note in notes if note)
    return f"{info.description} [{noted}]".replace("%", "%%") if noted else f"{info.description}"


def _range(info: FieldInfo) -> str:
    """ "1 or more", "above 0 up to 1"; choices are in the metavar."""
    words = []
    for item in info.metadata:
        match item:
            case annotated_types.Ge(ge=least):
                words.append(f"from {least}")
            case annotated_types.Gt(gt=above):
                words.append(f"above {above}")
            case annotated_types.Le(le=most):
                words.append(f"up to {most}")
    return " ".join(words)


def _metavar(info: FieldInfo) -> str:
    """What kind of value it is."""
    kind = info.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(str(choice) for choice in typing.get_args(kind)) + "}"
    if typing.get_origin(kind) is tuple:
        return "N,N" if typing.get_args(kind)[0] is int else "A,B"
    return {int: "N", float: "X", Path: "FILE"}.get(typing.cast(type, kind), "TEXT")


def _serve(args: argparse.Namespace) -> int:
    options = settings.load(flags_of(args), args.config).settings
    with run.listening(options) as listeners:
        _check_folder(options.model)
        if options.api_workers > 1:
            from server import workers

            return workers.serve(options, listeners)
        client = _engine(options)
        if isinstance(client, ProcessClient):
            # Until the server minds signals itself: what is given back at the end would stay where it just ended.
            signal.signal(signal.SIGTERM, _leave)
            client.spawn()
        return run.serve(client, options, *listeners)


def _leave(signal_number: int, frame: types.FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)


def _engine(options: Settings) -> EngineClient:
    config = options.to_engine_config()
    return InProcessClient.from_config(config) if options.in_process else ProcessClient(config)


def _doctor(args: argparse.Namespace) -> int:
    from server import doctor

    return doctor.examine(settings.load(flags_of(args), args.config).settings)


def _chat(args: argparse.Namespace) -> int:
    from server import terminal_chat

    return terminal_chat.run(args)


def _bench(args: argparse.Namespace) -> int:
    from server import bench

    return bench.run(args)


def _kv(args: argparse.Namespace) -> int:
    from server import kv_command

    return kv_command.run(args)


def _batch(args: argparse.Namespace) -> int:
    from server import batch

    options = settings.load(flags_of(args), args.config).settings
    if args.url is not None:
        return batch.run(args, options, None)
    _check_folder(options.model)
    return batch.run(args, options, _engine(options))


def _check_folder(model: str) -> None:
    """Say at once what the engine would find out after seconds of imports. A name that is no path may be a hub id."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise ModelError(f"{model} holds neither config.json nor a .gguf file: it is no model's folder")
    elif model.startswith(("/", "./", "../")) and not path.exists():
        raise ModelError(f"there is no model at {model}")


def _show_config(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    loaded = settings.load(flags_of(args), args.config)
    table = Table("option", "value", "unit", "from", "read by", box=None, header_style="bold")
    for field in Settings.model_fields:
        about = option(field)
        value = _shown(getattr(loaded.settings, field))
        table.add_row(field, value, about.unit, loaded.sources[field], about.reader)
    # Wide enough not to cut a value when the output is a pipe.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return run.EXIT_OK


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(_shown(item) for item in value) or "-"
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _version(args: argparse.Namespace) -> int:
    from server.models import version

    print(f"cellserve {version()}")
    return run.EXIT_OK


def _fail(error: Exception, exit_code: int) -> int:
    print(f"cellserve: {error}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
