"""The command line: one thin layer of verbs. Each exits 0, or with one clear line on stderr."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from . import __version__
from .presets import preset, presets

if TYPE_CHECKING:
    from .lm import LM


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = _parse(parser, arguments)
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


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Texts and key=value pairs of a verb that takes several may stand before, between and after its options."""
    options, rest = parser.parse_known_args(arguments)
    several = next((name for name in ("settings", "text") if hasattr(options, name)), None)
    wrong = [word for word in rest if word.startswith("-") or several is None]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if several is not None:
        setattr(options, several, [*getattr(options, several), *rest])
    return options


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

    verb = verbs.add_parser("demo", help="train a small translator from scratch, in a few minutes, and try it")
    verb.add_argument("settings", nargs="*", metavar="key=value", help="changes to the recipe, such as train.steps=200")
    verb.add_argument("--out", metavar="DIR", help="the folder of the run (runs/demo)")
    verb.set_defaults(run=_demo)

    verb = verbs.add_parser("train", help="train a model from scratch, as a recipe says")
    verb.add_argument("recipe", help="a TOML file, or the name of a recipe that comes with the package, such as gpt")
    verb.add_argument(
        "settings", nargs="*", metavar="key=value", help="changes, such as train.steps=200 data.train=FILE"
    )
    verb.add_argument("--out", metavar="DIR", help="the folder of the run; the model is then DIR/model (runs/RECIPE)")
    verb.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR, exactly")
    verb.add_argument(
        "--dry-run", action="store_true", help="print sizes, and memory and time as a few steps show them"
    )
    verb.add_argument("--quiet", action="store_true", help="no progress; errors only")
    verb.set_defaults(run=_train)

    verb = verbs.add_parser("presets", help="list the named models with their sizes")
    verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verb.set_defaults(run=_presets)

    verb = verbs.add_parser("generate", help="continue a text, or answer a source, as it comes")
    verb.add_argument("model", help="a folder in Hugging Face's format, such as DIR/model of a run, or a .gguf file")
    verb.add_argument("prompt", nargs="?", help="the text; otherwise each line of standard input is one")
    verb.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    verb.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (%(default)s)")
    verb.add_argument("--top-k", type=int)
    verb.add_argument("--top-p", type=float)
    verb.add_argument("--seed", type=int)
    verb.set_defaults(run=_generate)

    verb = verbs.add_parser("translate", help="translate texts with an encoder-decoder")
    verb.add_argument("model", help="a folder in Hugging Face's format, such as DIR/model of a run")
    verb.add_argument("text", nargs="*", help="the texts; otherwise each line of standard input is one")
    verb.add_argument("--to", metavar="LANGUAGE", help="the language token the source begins with, such as de")
    verb.add_argument("--max-new-tokens", type=int, help="of each translation (as many as the model has positions for)")
    verb.set_defaults(run=_translate)

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


def _train(options: argparse.Namespace) -> int:
    from .train import main as train

    return train(
        options.recipe, options.settings, options.out, resume=options.resume, dry_run=options.dry_run,
        quiet=options.quiet,
    )  # fmt: skip


def _demo(options: argparse.Namespace) -> int:
    from .demo import run

    return run(options.out, options.settings)


def _generate(options: argparse.Namespace) -> None:
    from .lm import load

    lm = load(options.model)
    wanted = dict(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    wanted |= dict(top_k=options.top_k, top_p=options.top_p, seed=options.seed)
    for text in [options.prompt] if options.prompt is not None else _lines():
        for piece in lm.stream(text, **wanted):
            print(piece, end="", flush=True)
        print()


def _translate(options: argparse.Namespace) -> None:
    from .lm import load

    lm = load(options.model)
    if lm.config.shape != "encoder-decoder":
        raise ValueError(f"translate needs an encoder-decoder; {options.model} is a {lm.config.shape}")
    token = f"<{options.to}>" if options.to else ""
    if token and lm.tokenizer.id_of(token) is None:
        raise ValueError(f"the model has no token {token}; --to names a language it was trained to write")
    for text in options.text or _lines():
        print(lm.generate(f"{token} {text}".lstrip(), max_new_tokens=_room(lm, options.max_new_tokens)), flush=True)


def _room(lm: LM, wanted: int | None) -> int:
    """As many tokens as were asked for; otherwise as many as the model has positions for."""
    return wanted or min(lm.config.max_positions, 256)


def _lines() -> Iterator[str]:
    """The lines of standard input, one text each."""
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")


def _presets(options: argparse.Namespace) -> None:
    from .models import build

    rows = []
    for name in presets():
        config = preset(name)
        rows.append({"name": name, "parameters": build(config, device="meta").num_parameters(), **config.to_dict()})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    from .presets_table import preset_table

    preset_table(rows)
