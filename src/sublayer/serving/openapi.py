"""The server in OpenAPI's words: requests as they are checked, answers and errors as they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.chat import find_template
from .engine import EncoderEngine, Engine
from .wire import IGNORED, UNSUPPORTED, Body, ChatBody, CompletionBody, EmbeddingBody

Schema = dict[str, Any]
PLACE = "#/components/schemas/"
STATUSES = {
    400: "Something in the request is wrong; `code` is `context_length_exceeded` where it is too long.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is larger than 1 MB.",
    415: "The body is not sent as JSON.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The server failed.",
    503: "The server is shutting down.",
    504: "The answer took longer than the server allows.",
}


def _object(**properties: Schema) -> Schema:
    """An object with just these properties, all of them."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": PLACE + name}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
REASON = {"enum": ["stop", "length"]}
NAMED = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_list(COUNT))}
CARD = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
CHANCES = _object(
    tokens=_list(TEXT), token_logprobs=_list(NUMBER), text_offset=_list(COUNT),
    top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
)  # fmt: skip
CHAT_CHANCES = _object(content=_list(_object(**NAMED, top_logprobs=_list(_object(**NAMED)))), refusal={"type": "null"})
MESSAGE = _object(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
DELTA = _object(role={"const": "assistant"}, content=TEXT) | {"required": []}
VECTOR = {"anyOf": [_list(NUMBER), {"type": "string", "contentEncoding": "base64"}]}


def _answer(kind: str, choice: Schema, **more: Schema) -> Schema:
    return _object(id=TEXT, created=COUNT, model=TEXT, object={"const": kind}, choices=_list(choice), **more)


def _chunk(kind: str, **said: Schema) -> Schema:
    """A piece of an answer; `usage` is there where it was asked for, and tells something in the last one."""
    out = _answer(kind, _object(index=COUNT, **said, finish_reason=_or_null(REASON)))
    out["properties"]["usage"] = _or_null(_ref("Usage"))
    return out


def _events(chunk: str) -> Schema:
    """Lines of `data: ` with a piece of the answer each, or an error in the middle of it; then [DONE]."""
    piece = {"anyOf": [_ref(chunk), _ref("Error")]}
    data = {"anyOf": [{"const": "[DONE]"}, TEXT | {"contentMediaType": "application/json", "contentSchema": piece}]}
    return {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}


ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
    "Health": _object(status={"enum": ["ok", "unavailable"]}),
    "Page": {"type": "object"},
    "Usage": USAGE,
    "Model": CARD,
    "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Completion": _answer(
        "text_completion", _object(index=COUNT, text=TEXT, logprobs=_or_null(CHANCES), finish_reason=REASON),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _chunk("text_completion", text=TEXT, logprobs=_or_null(CHANCES)),
    "ChatCompletion": _answer(
        "chat.completion", _object(index=COUNT, message=MESSAGE, logprobs=_or_null(CHAT_CHANCES), finish_reason=REASON),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", delta=DELTA, logprobs=_or_null(CHAT_CHANCES)),
    "Embeddings": _object(
        object={"const": "list"}, model=TEXT, usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
        data=_list(_object(object={"const": "embedding"}, index=COUNT, embedding=VECTOR)),
    ),
}  # fmt: skip


def describe(engines: Mapping[str, Engine], *, key: bool) -> Schema:
    """The whole document; `key` says whether the server asks for one."""
    encoders = [name for name, engine in engines.items() if isinstance(engine, EncoderEngine)]
    others = [name for name in engines if name not in encoders]
    chatty = [name for name in others if _chats(engines[name])]
    schemas = dict(ANSWERS)
    for kind, names in ((CompletionBody, others), (ChatBody, chatty), (EmbeddingBody, encoders)):
        schemas |= _bodies(kind, names)
    here = {"name": "name", "in": "path", "required": True, "schema": _model(list(engines))}
    paths = {
        "/health": {"get": _operation("Whether all engines run", "Health", (), open_=True)},
        "/metrics": {"get": _operation("Counts, for Prometheus", None, (401,))},
        "/openapi.json": {"get": _operation("This page", "Page", (401,))},
        "/v1/models": {"get": _operation("The models served", "Models", (401,))},
        "/v1/models/{name}": {"get": _operation("One of them", "Model", (401, 404)) | {"parameters": [here]}},
        "/v1/completions": {"post": _posted("Go on with a text", "Completion", "CompletionBody")},
        "/v1/chat/completions": {"post": _posted("Answer in a conversation", "ChatCompletion", "ChatBody")},
        "/v1/embeddings": {"post": _posted("Texts as vectors", "Embeddings", "EmbeddingBody")},
    }
    paths["/health"]["get"]["responses"]["503"] = _response("An engine has stopped.", "Health")
    for path, chunk in (("/v1/completions", "CompletionChunk"), ("/v1/chat/completions", "ChatCompletionChunk")):
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = _events(chunk)
    document: Schema = {
        "openapi": "3.2.0",
        "info": {"title": "sublayer", "version": "v1", "description": "OpenAI's interface."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _bodies(kind: type[Body], names: list[str]) -> dict[str, Schema]:
    """A request and what it is made of, with the fields that are taken and change nothing."""
    schema = kind.model_json_schema(ref_template=PLACE + "{model}")
    parts = schema.pop("$defs", {})
    fields = schema["properties"]
    fields["model"] = _model(names)
    for name in sorted(IGNORED - fields.keys()):
        fields[name] = {"description": "Taken, and changes nothing."}
    for name in sorted(UNSUPPORTED.keys() - fields.keys()):
        fields[name] = {"enum": list(UNSUPPORTED[name]), "description": "Not supported: these values ask for nothing."}
    return {kind.__name__: schema, **parts}


def _chats(engine: Engine) -> bool:
    """Whether there is a chat template, and one that can be read."""
    tokenizer = engine.lm.tokenizer
    try:
        return find_template(tokenizer.settings, tokenizer.folder) is not None
    except ValueError:
        return False


def _model(names: list[str]) -> Schema:
    return {"type": "string", "enum": names} if names else TEXT


def _operation(summary: str, answer: str | None, errors: tuple[int, ...], *, open_: bool = False) -> Schema:
    responses = {"200": _response(summary, answer)}
    responses |= {str(status): _response(STATUSES[status], "Error") for status in (*errors, 500)}
    if 429 in errors:
        responses["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return {"summary": summary, "responses": responses} | ({"security": []} if open_ else {})


def _posted(summary: str, answer: str, body: str) -> Schema:
    content = {"application/json": {"schema": _ref(body)}}
    errors = (400, 401, 404, 408, 413, 415, 429, 503, 504)
    return _operation(summary, answer, errors) | {"requestBody": {"required": True, "content": content}}


def _response(told: str, answer: str | None) -> Schema:
    content = {"text/plain": {"schema": TEXT}} if answer is None else {"application/json": {"schema": _ref(answer)}}
    return {"description": told, "content": content}
