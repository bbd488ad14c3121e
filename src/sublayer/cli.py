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

    _finetune_verb(verbs)

    verb = verbs.add_parser("presets", help="list the named models with their sizes")
    verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verb.set_defaults(run=_presets)

    _text_verbs(verbs)
    _serve_verb(verbs)

    verb = verbs.add_parser("convert", help="write a checkpoint in another form: Hugging Face folder or GGUF file")
    verb.add_argument("source", help="a folder in Hugging Face's format, a .gguf file, or a name on the hub")
    verb.add_argument("target", help="the folder to write, or the .gguf file")
    verb.add_argument("--to", choices=("hf", "gguf"), help="the form to write; otherwise the target's name decides")
    verb.add_argument("--dtype", help="float32, bfloat16 or float16; for GGUF also q8_0. Otherwise that of the source")
    verb.add_argument("--max-shard-size", default="5GB", help="the largest file of weights, e.g. 500MB (%(default)s)")
    verb.add_argument("--merge", metavar="ADAPTER", help="a folder with an adapter (LoRA) to compute into the weights")
    verb.add_argument("--json", action="store_true", help="print the summary as JSON")
    verb.set_defaults(run=_convert)
    return parser


def _finetune_verb(verbs: argparse._SubParsersAction[Parser]) -> None:
    verb = verbs.add_parser("finetune", help="go on training a model on data of yours: an adapter (LoRA), or all of it")
    verb.add_argument("model", help="a folder in Hugging Face's format, a .gguf file, a name on the hub, or a recipe")
    verb.add_argument("settings", nargs="*", metavar="key=value", help="such as train.epochs=2 lora.alpha=32")
    verb.add_argument("--data", metavar="FILE", help="text, TSV, CSV, JSONL, Parquet; its columns say what is learned")
    verb.add_argument("--valid", metavar="FILE", help="what to validate with; or data.split=0.1 holds rows out")
    verb.add_argument("--objective", help="what to learn, where the columns should not decide")
    method = verb.add_mutually_exclusive_group()
    method.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank (8), in PEFT's format")
    method.add_argument("--full", action="store_true", help="train all weights")
    verb.add_argument("--bits", type=int, choices=(4, 8), help="hold the frozen weights in so many bits (QLoRA)")
    verb.add_argument("--out", metavar="DIR", help="the folder of the run; the result is then DIR/model (runs/DATA)")
    verb.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR, exactly")
    verb.add_argument(
        "--dry-run", action="store_true", help="print sizes, and memory and time as a few steps show them"
    )
    verb.add_argument("--quiet", action="store_true", help="no progress; errors only")
    verb.set_defaults(run=_finetune)


def _text_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    verb = verbs.add_parser("generate", help="continue a text, answer a source, or hold a conversation, as it comes")
    verb.add_argument("model", help="a folder in Hugging Face's format, such as DIR/model of a run, or a .gguf file")
    verb.add_argument("prompt", nargs="?", help="the text; otherwise each line of standard input is one")
    verb.add_argument("--chat", action="store_true", help="a conversation, by the model's own template")
    verb.add_argument("--system", metavar="TEXT", help="with --chat: how to answer")
    verb.add_argument(
        "--batch", nargs=2, metavar=("IN", "OUT"),
        help='answer each line of IN, {"prompt": …} or {"messages": …}, in a line of OUT; again, it goes on',
    )  # fmt: skip
    verb.add_argument("--max-new-tokens", type=int, help="(128; 512 in a conversation)")
    verb.add_argument(
        "--stop", action="append", metavar="TEXT", help="the answer ends before this; several may be given"
    )
    guess = verb.add_mutually_exclusive_group()
    guess.add_argument("--draft", metavar="MODEL", help="a smaller model of the same tokenizer guesses; same answer")
    guess.add_argument("--lookup", action="store_true", default=None, help="guess from the text so far; same answer")
    verb.add_argument(
        "--compile", action="store_true", default=None, help="on a GPU: the first answer waits, later ones are faster"
    )
    verb.add_argument(
        "--json-schema", type=_schema, metavar="FILE", help="the answer is JSON of this schema; or give its text"
    )
    verb.add_argument("--regex", metavar="TEXT", help="the answer is matched by this as a whole")
    verb.add_argument("--grammar", type=_file, metavar="FILE", help="the answer is of this grammar, GBNF or Lark")
    verb.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (%(default)s)")
    verb.add_argument("--top-k", type=int)
    verb.add_argument("--top-p", type=float)
    verb.add_argument("--min-p", type=float)
    verb.add_argument("--repetition-penalty", type=float)
    verb.add_argument("--seed", type=int)
    _beams(verb)
    verb.add_argument("--json", action="store_true", help="each answer as JSON, with its log-probabilities")
    verb.set_defaults(run=_generate)

    verb = verbs.add_parser("translate", help="translate texts with an encoder-decoder")
    verb.add_argument("model", help="a folder in Hugging Face's format, such as DIR/model of a run")
    verb.add_argument("text", nargs="*", help="the texts; otherwise each line of standard input is one")
    verb.add_argument("--to", metavar="LANGUAGE", help="the language token the source begins with, such as de")
    verb.add_argument("--max-new-tokens", type=int, help="of each translation (as many as the model has positions for)")
    verb.add_argument("--input", metavar="FILE", help="translate each line of a file")
    verb.add_argument("--output", metavar="FILE", help="write the translations there")
    _beams(verb)
    verb.set_defaults(run=_translate)

    verb = verbs.add_parser("evaluate", help="measure a model on data: BLEU and chrF, perplexity, or accuracy")
    verb.add_argument("model", help="a folder in Hugging Face's format, such as DIR/model of a run")
    verb.add_argument("--data", required=True, metavar="FILE", help="text, TSV, CSV, JSONL or Parquet")
    verb.add_argument("--source", metavar="COLUMN", help="what the model reads (source; text)")
    verb.add_argument("--target", metavar="COLUMN", help="what is right (target; label)")
    verb.add_argument("--domain", metavar="COLUMN", help="measure the texts of each domain by themselves too")
    verb.add_argument("--metric", action="append", help="only this one; several may be given")
    verb.add_argument("--limit", type=int, metavar="N", help="the first N rows only; of plain text, pieces of 64 KB")
    verb.add_argument("--max-new-tokens", type=int, help="of each text it writes")
    _beams(verb)
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_evaluate)


def _serve_verb(verbs: argparse._SubParsersAction[Parser]) -> None:
    verb = verbs.add_parser("serve", help="answer many clients at once, through OpenAI's interface over HTTP")
    verb.add_argument("model", nargs="+", help="a folder, served under its name, or NAME=FOLDER")
    verb.add_argument("--host", default="127.0.0.1", help="the address to listen on (%(default)s: this machine only)")
    verb.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    verb.add_argument("--max-batch", type=int, default=16, metavar="N", help="answers under way at once (%(default)s)")
    verb.add_argument(
        "--max-tokens-cached", type=int, metavar="N", help="in all answers under way together (2048 for each)"
    )
    verb.add_argument("--queue", type=int, default=64, metavar="N", help="requests that may wait (%(default)s)")
    verb.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one answer (%(default)s)")
    verb.add_argument("--api-key", metavar="KEY", help="what clients must show; better, the variable SUBLAYER_API_KEY")
    verb.add_argument("--device", help="cpu, cuda …")
    verb.add_argument("--dtype", help="float32, bfloat16 or float16; otherwise that of the folder")
    verb.set_defaults(run=_serve)


def _beams(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--num-beams", type=int, metavar="N", help="search with N beginnings at once (1: none)")
    verb.add_argument("--length-penalty", type=float, help="with beams: above 1 prefers longer answers (1)")


def _schema(text: str) -> object:
    """A JSON schema: itself, or the file it stands in."""
    try:
        return json.loads(text if text.lstrip().startswith("{") or text == "true" else _file(text))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]} is not valid JSON ({error})") from None


def _file(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path[:200]} cannot be read: {error}") from None


def _convert(options: argparse.Namespace) -> None:
    from .convert import convert

    convert(
        options.source, options.target, options.to, options.dtype, options.max_shard_size, merge=options.merge,
        as_json=options.json,
    )  # fmt: skip


def _train(options: argparse.Namespace) -> int:
    from .train import main as train

    return train(
        options.recipe, options.settings, options.out, resume=options.resume, dry_run=options.dry_run,
        quiet=options.quiet,
    )  # fmt: skip


def _finetune(options: argparse.Namespace) -> int:
    from .finetune import Choices
    from .finetune import main as finetune

    choices = Choices(
        data=options.data, valid=options.valid, objective=options.objective, full=options.full, rank=options.lora,
        bits=options.bits,
    )  # fmt: skip
    return finetune(
        options.model, options.settings, choices, options.out, resume=options.resume, dry_run=options.dry_run,
        quiet=options.quiet,
    )  # fmt: skip


def _demo(options: argparse.Namespace) -> int:
    from .demo import run

    return run(options.out, options.settings)


def _generate(options: argparse.Namespace) -> int:
    from .text_verbs import generate

    return generate(options)


def _translate(options: argparse.Namespace) -> int:
    from .text_verbs import translate

    return translate(options)


def _evaluate(options: argparse.Namespace) -> int:
    from .text_verbs import evaluate

    return evaluate(options)


def _serve(options: argparse.Namespace) -> None:
    from .serving import Limits, serve

    limits = Limits(max_batch=options.max_batch, max_tokens_cached=options.max_tokens_cached, queue=options.queue)
    serve(
        options.model, host=options.host, port=options.port, limits=limits, timeout=options.timeout,
        api_key=options.api_key, device=options.device, dtype=options.dtype,
    )  # fmt: skip


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
