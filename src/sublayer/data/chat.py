"""A conversation as one text, by the template that a checkpoint brings with it.

A template is a program in Jinja's language, written by a stranger. It is run in Jinja's sandbox, and besides in a
process of its own, because only a process can be stopped whatever it is doing: loops in loops, a string that doubles, a
number of a billion digits. This file is also what that process runs, so that it starts without the rest of the package.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_TEMPLATE_BYTES = 256 << 10
MAX_TEXT_BYTES = 4 << 20
MAX_MEMORY_BYTES = 1 << 30
MAX_SECONDS = 5.0
SECONDS_EACH = 0.05  # more, for each further text of one process
OLDEST_JINJA = (3, 1, 6)  # there are known ways out of the sandboxes before
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special: Mapping[str, str],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text that the model is to read. `special` holds bos_token, eos_token …, by the names templates use."""
    check_messages(messages)
    values = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    (answer,) = render_all(template, [values], special=special)
    if isinstance(answer, ValueError):
        raise answer
    return answer


def render_all(
    template: str, values: Sequence[Mapping[str, Any]], *, special: Mapping[str, str], mark: str = ""
) -> list[str | ValueError]:
    """The text for each of several sets of values, or what is wrong with it, by one process.

    A `mark` is put before and after what the template has between {% generation %} and {% endgeneration %}.
    """
    _check_jinja()
    if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"the chat template is larger than {MAX_TEMPLATE_BYTES >> 10} KB; that is no template")
    whole = [{"tools": None, "documents": None, **special, **one} for one in values]
    try:
        request = json.dumps({"template": template, "values": whole, "mark": mark}, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the messages and tools must be what JSON can hold: {error}") from None
    answers = _in_its_own_process(request, MAX_SECONDS + SECONDS_EACH * (len(whole) - 1))
    if isinstance(answers, dict):
        answers = [answers] * len(whole)
    return [
        ValueError(f"the chat template {answer['error']}") if "error" in answer else str(answer["text"])
        for answer in answers
    ]


def check_messages(messages: Any) -> None:
    """A list of {"role": …, "content": …}; only a message that calls tools may do without content."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError('messages must be a list of at least one {"role": "user", "content": "…"}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f'message {number} is a {type(message).__name__}; expected {{"role": …, "content": …}}')
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"message {number} has the role {role!r}; expected a name such as system, user, assistant")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {number} has content of type {type(content).__name__}; expected text")


def find_template(settings: Mapping[str, Any], folder: Path | None, *, tools: bool = False) -> str | None:
    """The template of a tokenizer: chat_template.jinja beside it, or "chat_template" of its settings.

    There may be several under names; that for tools is taken when there are tools, and else the default one.
    """
    path = None if folder is None else folder / "chat_template.jinja"
    if path is not None and path.exists():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ValueError(f"{path} is larger than {MAX_TEMPLATE_BYTES >> 10} KB; that is no template")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not valid UTF-8 at byte {error.start:,}") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("tool_use" if tools and "tool_use" in found else "default")
    return found if isinstance(found, str) and found else None


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name, as templates use them."""
    named = {f"{name}_token": settings.get(f"{name}_token") for name in SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} is none of them")


def _check_jinja() -> None:
    try:
        version = importlib.metadata.version("jinja2")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("chat templates need the package 'jinja2': pip install 'sublayer[chat]'") from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < OLDEST_JINJA:
        oldest = ".".join(map(str, OLDEST_JINJA))
        raise ValueError(f"jinja2 {version} lets templates out of the sandbox; {oldest} or newer is needed")


def _in_its_own_process(request: str, seconds: float) -> list[dict[str, Any]] | dict[str, Any]:
    """An answer for each text, or one for all where the process failed."""
    # -P: the folder of this file stays out of the path, lest its modules pass for those of the standard library.
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=seconds, check=False)
        answers = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"was stopped: it ran for more than {seconds:g} seconds"}
    except (OSError, ValueError):  # a crash, or killed for want of memory
        return {"error": "could not be run: its process ended without an answer"}
    return answers if isinstance(answers, list) else {"error": "gave no text"}


# In the process of its own


def _work() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # not on Windows; the time is limited all the same
        pass
    request = json.loads(sys.stdin.buffer.read())
    environment = _environment(request["mark"])
    sys.stdout.write(json.dumps([_answer(environment, request["template"], values) for values in request["values"]]))


def _answer(environment: Any, template: str, values: dict[str, Any]) -> dict[str, str]:
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    pieces: list[str] = []
    size = 0
    try:
        for piece in environment.from_string(template).generate(values):
            pieces.append(piece)
            size += len(piece.encode("utf-8", "replace"))
            if size > MAX_TEXT_BYTES:
                return {"error": f"was stopped: it wrote more than {MAX_TEXT_BYTES >> 20} MB"}
    except TemplateSyntaxError as error:
        return {"error": f"is wrong at line {error.lineno}: {_one_line(error)}"}
    except MemoryError:
        return {"error": f"was stopped: it needs more than {MAX_MEMORY_BYTES >> 20} MB of memory"}
    except Exception as error:  # whatever a program can do wrong
        refused = type(error) is TemplateError  # by raise_exception
        return {"error": f"{'refuses the messages' if refused else 'fails'}: {_one_line(error)}"}
    return {"text": "".join(pieces)}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _environment(mark: str) -> Any:
    """Jinja as transformers sets it up, which is what templates are written for."""
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} is around what the assistant says; it adds the mark, if any."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own type

        def parse(self, parser: Any) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
            edge = nodes.Output([nodes.TemplateData(mark)]).set_lineno(line)
            return [edge, body, edge]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    out = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    out.filters["tojson"] = tojson
    out.globals["raise_exception"] = raise_exception
    out.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return out


if __name__ == "__main__":
    _work()
