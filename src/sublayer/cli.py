"""The command line: one thin layer of verbs. Each exits 0, or with one clear line on stderr."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .presets import preset, presets


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except BrokenPipeError:  # the reader of our output has gone: `sublayer presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"sublayer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sublayer: interrupted", file=sys.stderr)
        return 130


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line and name the nearest word that would have been right."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        known = _words(self)
        near = difflib.get_close_matches((wrong[1] or wrong[2]).split("=")[0], known, n=1) if wrong else []
        hint = f"; did you mean {near[0]!r}?" if near else f"; see {self.prog} --help"
        print(f"sublayer: {message}{hint}", file=sys.stderr)
        raise SystemExit(2)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Every option and choice of a parser and of its verbs."""
    words: list[str] = []
    for action in parser._actions:
        words += [*action.option_strings, *map(str, action.choices or ())]
        if isinstance(action.choices, dict):
            words += [word for verb in action.choices.values() for word in _words(verb)]
    return words


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sublayer", description="Every Transformer from one small core.")
    parser.add_argument("--version", action="version", version=f"sublayer {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    verb = verbs.add_parser("demo", help="show the presets, then build each family small and run it")
    verb.set_defaults(run=_demo)

    verb = verbs.add_parser("presets", help="list the named models with their sizes")
    verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verb.set_defaults(run=_presets)

    verb = verbs.add_parser("convert", help="write a checkpoint in another form: Hugging Face folder or GGUF file")
    verb.add_argument("source", help="a folder in Hugging Face's format, a .gguf file, or a name on the hub")
    verb.add_argument("target", help="the folder to write, or the .gguf file")
    verb.add_argument("--to", choices=("hf", "gguf"), help="the form to write; otherwise the target's name decides")
    verb.add_argument("--dtype", help="float32, bfloat16 or float16; for GGUF also q8_0. Otherwise that of the source")
    verb.add_argument("--max-shard-size", default="5GB", help="the largest file of weights, e.g. 500MB (%(default)s)")
    verb.add_argument("--json", action="store_true", help="print the summary as JSON")
    verb.set_defaults(run=_convert)
    return parser


def _convert(options: argparse.Namespace) -> None:
    from .convert import convert

    convert(options.source, options.target, options.to, options.dtype, options.max_shard_size, as_json=options.json)


def _demo(options: argparse.Namespace) -> None:
    from .demo import run

    run()


def _presets(options: argparse.Namespace) -> None:
    from .models import build

    rows = []
    for name in presets():
        config = preset(name)
        rows.append({"name": name, "parameters": build(config, device="meta").num_parameters(), **config.to_dict()})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    from .demo import preset_table

    preset_table(rows)
