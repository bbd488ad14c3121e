"""The verbs of the command line that read and write text: generate, translate and evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from .config import unknown
from .data.chat import check_messages
from .data.readers import find_files, read_rows
from .lm import LM, load

BATCH = 32  # texts translated at once
WINDOW = 1024  # tokens that a decoder reads at once when its perplexity is measured
CHOICES = (
    "max_new_tokens", "num_beams", "length_penalty", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "seed", "stop", "json_schema", "regex", "grammar", "lookup", "compile",
)  # fmt: skip
HELP = "/clear forgets what was said, /system TEXT sets how to answer, /quit leaves, /help; Ctrl-C stops an answer"


# generate


def generate(options: Namespace) -> int:
    if options.batch and (options.prompt is not None or options.chat or options.json):
        raise ValueError("--batch takes its prompts from its file and writes JSON; leave out PROMPT, --chat and --json")
    if options.system is not None and not options.chat:
        raise ValueError("--system is for conversations; add --chat")
    wanted = _wanted(options) | ({} if options.draft is None else {"draft": load(options.draft)})
    if options.batch:
        source, target = map(Path, options.batch)
        rows = _batch_rows(source)
        done = _batch_done(target, len(rows))
        return _batch(load(options.model), rows, target, done, wanted)
    lm = load(options.model)
    if options.chat and options.prompt is None:
        if options.json:
            raise ValueError("--chat with --json needs a PROMPT: one question, one answer")
        _converse(lm, options.system, wanted)
        return 0
    for text in [options.prompt] if options.prompt is not None else _lines(sys.stdin):
        messages = [*_system(options.system), dict(role="user", content=text)] if options.chat else None
        if options.json:
            detail = lm.generate_details(text, **wanted)[0] if messages is None else lm.chat_details(messages, **wanted)
            kept = {name: value for name, value in dataclasses.asdict(detail).items() if name != "top"}
            print(json.dumps({"prompt": text, **kept}, ensure_ascii=False), flush=True)
            continue
        for piece in lm.stream(text, **wanted) if messages is None else lm.stream_chat(messages, **wanted):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def _wanted(options: Namespace) -> dict[str, Any]:
    """The options of generation that were given."""
    values = {name: getattr(options, name, None) for name in CHOICES}
    return {name: value for name, value in values.items() if value is not None}


def _lines(source: Iterable[str]) -> Iterator[str]:
    """One text in each line that has any."""
    for line in source:
        if line.strip():
            yield line.rstrip("\n")


def _system(text: str | None) -> list[dict[str, str]]:
    return [dict(role="system", content=text)] if text else []


def _converse(lm: LM, system: str | None, wanted: dict[str, Any]) -> None:
    """Questions and answers in turn, until the end of the input."""
    lm.chat_prompt([*_system(system), dict(role="user", content="?")])  # no template: say so before the first question
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a line to edit and a history
        print(HELP)
    messages = _system(system)
    while True:
        try:
            text = input("> " if asks else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # it stops answers; nothing is being answered
            print()
            continue
        if text == "/quit":
            return
        if text.startswith("/"):
            messages = _command(text, messages)
        elif text:
            messages = _turn(lm, [*messages, dict(role="user", content=text)], wanted)


def _command(text: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation after a command."""
    name, _, rest = text.partition(" ")
    kept = [message for message in messages if message["role"] == "system"]
    if name == "/clear":
        return kept
    if name == "/system":
        return _system(rest.strip()) + [message for message in messages if message["role"] != "system"]
    print(HELP if name == "/help" else unknown("command", name, ["/clear", "/system", "/quit", "/help"]))
    return messages


def _turn(lm: LM, messages: list[dict[str, str]], wanted: dict[str, Any]) -> list[dict[str, str]]:
    """Answer the last message. What was said before an interruption stays said; what cannot be answered is dropped."""
    said = ""
    try:
        for piece in lm.stream_chat(messages, **wanted):
            said += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", flush=True)
        return [*messages, dict(role="assistant", content=said)] if said else messages[:-1]
    except ValueError as error:
        print(f"{error} (/clear begins anew)", flush=True)
        return messages[:-1]
    print(flush=True)
    return [*messages, dict(role="assistant", content=said)]


# generate --batch


def _batch_rows(path: Path) -> list[dict[str, Any]]:
    """All rows, checked before a model is loaded: a mistake in the last is told at once."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 at byte {error.start:,}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, row {number}: is not valid JSON ({error}); expected one object a line") from None
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise ValueError(f'{path}, row {number}: expected {{"prompt": "…"}} or {{"messages": […]}}')
        if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
            raise ValueError(f"{path}, row {number}: the prompt must be a text that is not empty")
        if "messages" in row:
            try:
                check_messages(row["messages"])
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: {error}") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no row; expected one JSON object a line")
    return rows


def _batch_done(path: Path, count: int) -> int:
    """How many rows are answered already; half a line, from when the program was killed, is taken away first.

    Only a file whose every line is an answer is touched: it may be another file, named by mistake.
    """
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole, half = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    lines = whole.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith(f'{{"row": {number}, '.encode()):
            raise ValueError(f"{path}, line {number}: is no answer of a batch; name a new file to write to")
    begins = f'{{"row": {len(lines) + 1}, '.encode()
    if not (half.startswith(begins) or begins.startswith(half)):
        raise ValueError(f"{path}, line {len(lines) + 1}: is no answer of a batch; name a new file to write to")
    if len(lines) > count:
        raise ValueError(f"{path} has {len(lines)} answers and the batch {count} rows; they do not belong together")
    if half:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


def _batch(lm: LM, rows: list[dict[str, Any]], target: Path, done: int, wanted: dict[str, Any]) -> int:
    """One line of JSON for each row, written as soon as it is known."""
    failed = 0
    with target.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows[done:], done + 1):
            try:
                if "messages" in row:
                    detail = lm.chat_details(row["messages"], tools=row.get("tools"), top=None, **wanted)
                else:
                    detail = lm.generate_details(row["prompt"], top=None, **wanted)[0]
                answer = dict(text=detail.text, finish_reason=detail.finish_reason, tokens=len(detail.ids))
            except ValueError as error:  # such as a prompt that is too long; the others can still be answered
                answer, failed = dict(error=str(error)), failed + 1
            file.write(json.dumps({"row": number, **answer}) + "\n")
            file.flush()
    if failed:
        print(f"sublayer: {failed} of {len(rows)} rows could not be answered; see {target}", file=sys.stderr)
    return 1 if failed else 0


# translate


def translate(options: Namespace) -> int:
    if options.input and options.text:
        raise ValueError("give the texts or --input FILE, not both")
    if options.input and options.output and Path(options.input).resolve() == Path(options.output).resolve():
        raise ValueError(f"{options.output} is the input itself; name another file to write to")
    lm = load(options.model)
    if lm.config.shape != "encoder-decoder":
        raise ValueError(f"translate needs an encoder-decoder; {options.model} is a {lm.config.shape}")
    prefix = _language(lm, options.to)
    wanted = _wanted(options) | dict(max_new_tokens=_room(lm, options.max_new_tokens))
    with contextlib.ExitStack() as files:
        source: Iterable[str] = options.text or _lines(sys.stdin)
        if options.input:
            source = _text_lines(files.enter_context(open(options.input, encoding="utf-8-sig")), options.input)
        target = sys.stdout
        if options.output:
            target = files.enter_context(open(options.output, "w", encoding="utf-8"))
        lines = iter(source)
        size = BATCH if options.input else 1  # who types waits for an answer
        while part := list(itertools.islice(lines, size)):
            for answer in _translations(lm, [prefix + text if text.strip() else "" for text in part], wanted):
                print(" ".join(answer.splitlines()) if options.input else answer, file=target, flush=True)
    return 0


def _language(lm: LM, language: str | None) -> str:
    """What a source begins with, to ask for a language: <de>, or >>de<< as Marian's models have it."""
    names = [f"<{language}>", f">>{language}<<"] if language else []
    for name in names:
        if lm.tokenizer.id_of(name) is not None:
            return f"{name} "
    if names:
        raise ValueError(f"the model has no token {names[0]}; --to names a language it was trained to write")
    return ""


def _room(lm: LM, wanted: int | None) -> int:
    """As many tokens as were asked for; otherwise as many as the model has positions for."""
    return wanted or min(lm.config.max_positions, 256)


def _text_lines(file: TextIO, name: str) -> Iterator[str]:
    """Every line, the empty ones too: line 7 of the output is that of line 7."""
    try:
        for line in file:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8 ({error.reason}); save it as UTF-8") from None


def _translations(lm: LM, texts: list[str], wanted: dict[str, Any]) -> list[str]:
    """The answer to each text; nothing for an empty one."""
    real = [number for number, text in enumerate(texts) if text]
    answers = iter(lm.generate([texts[number] for number in real], **wanted) if real else [])
    return [next(answers) if text else "" for text in texts]


# evaluate


def evaluate(options: Namespace) -> int:
    lm = load(options.model)
    kind = lm.config.shape if lm.config.head == "lm" else lm.config.head
    if kind not in KINDS or lm.config.image_input:
        what = "language models, encoder-decoders and classifiers of text"
        raise ValueError(f"evaluate measures {what}; {options.model} is a {lm.config.shape} with head {kind!r}")
    measure, known = KINDS[kind]
    for name in options.metric or ():
        if name not in known:
            raise ValueError(unknown(f"metric of a {kind}", name, list(known)))
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit is {options.limit}; it must be at least 1")
    result = measure(lm, find_files(options.data), options)
    for part in (result, *result.get("domains", {}).values()):
        for name in known:
            if options.metric and name not in options.metric:
                part.pop(name, None)
    if options.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _show(result)
    return 0


def _show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name != "domains":
            print(f"{name:14} {value:,.4f}" if isinstance(value, float) else f"{name:14} {value:,}")
    for domain, values in result.get("domains", {}).items():
        numbers = (
            f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in values.items()
        )
        print(f"{domain:14} {'  '.join(numbers)}")


def _of_texts(lm: LM, files: list[Path], options: Namespace) -> dict[str, Any]:
    """What an encoder-decoder writes, against what it should have written; of each domain, if there is a column."""
    from .evaluate import compare

    columns = {"source": options.source or "source", "target": options.target or "target"}
    columns |= {"domain": options.domain} if options.domain else {}
    rows = [row.values for row in itertools.islice(read_rows(files, columns), options.limit)]
    wanted = _wanted(options) | dict(max_new_tokens=_room(lm, options.max_new_tokens))
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]["source"]))
    produced = [""] * len(rows)
    for start in range(0, len(order), BATCH):  # texts of about one length together
        part = order[start : start + BATCH]
        answers = lm.generate([rows[number]["source"] for number in part], **wanted)
        for number, answer in zip(part, answers, strict=True):
            produced[number] = answer
    expected = [row["target"] for row in rows]
    result: dict[str, Any] = {"rows": len(rows), **compare(produced, expected)}
    if options.domain:
        groups: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(str(row["domain"]), []).append(number)
        result["domains"] = {
            name: {"rows": len(of), **compare([produced[n] for n in of], [expected[n] for n in of])}
            for name, of in sorted(groups.items())
        }
    return result


def _of_decoder(lm: LM, files: list[Path], options: Namespace) -> dict[str, Any]:
    """How well a decoder foretells a text: each token but the first of a document, once, from those before it.

    A document longer than a window is read in windows that share one token, so that no token is left out.
    """
    rows = read_rows(files, {"text": options.source or "text"}, documents="file")
    window = min(lm.config.max_positions, WINDOW)
    total, tokens, size = 0.0, 0, 0
    waiting: list[int] = []
    for row in itertools.chain(itertools.islice(rows, options.limit), [None]):
        going = row is not None and row.values.get("continued", False)
        if not going:  # the document before is complete
            values = lm.logprobs(waiting[:1], waiting[1:])[0] if len(waiting) > 1 else []
            total, tokens, waiting = total + math.fsum(values), tokens + len(values), []
        if row is None:
            break
        text = row.values["text"]
        size += len(text.encode())
        waiting += lm.tokenizer.encode(text, special=not going)
        while len(waiting) > window:
            values = lm.logprobs(waiting[:1], waiting[1:window])[0]
            total, tokens, waiting = total + math.fsum(values), tokens + len(values), waiting[window - 1 :]
    if not tokens:
        raise ValueError(f"{options.data}: no document has two tokens; there is nothing to foretell")
    loss = -total / tokens
    return {
        "tokens": tokens,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": -total / math.log(2) / size,
    }


def _of_labels(lm: LM, files: list[Path], options: Namespace) -> dict[str, Any]:
    """How often the likeliest label is the right one; labels are given by name or by number."""
    columns = {"text": options.source or "text", "label": options.target or "label"}
    rows = itertools.islice(read_rows(files, columns), options.limit)
    right = count = 0
    while part := list(itertools.islice(rows, BATCH)):
        found = lm.classify([row.values["text"] for row in part])
        assert isinstance(found, list)
        for row, scores in zip(part, found, strict=True):
            names = list(scores)
            label = str(row.values["label"]).strip()
            if label not in names and not (label.isdecimal() and int(label) < len(names)):
                raise ValueError(f"{row.where()}: {unknown('label', label, names)}")
            label = label if label in names else names[int(label)]
            right += max(names, key=scores.__getitem__) == label
            count += 1
    return {"rows": count, "accuracy": right / count}


Measure = Callable[[LM, list[Path], Namespace], dict[str, Any]]
KINDS: dict[str, tuple[Measure, Sequence[str]]] = {
    "encoder-decoder": (_of_texts, ("bleu", "chrf", "exact_match")),
    "decoder": (_of_decoder, ("loss", "perplexity", "bits_per_byte")),
    "classifier": (_of_labels, ("accuracy",)),
}
