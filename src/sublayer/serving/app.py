"""The HTTP side: OpenAI's endpoints in front of the engines."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..generation.generate import make_options
from .engine import EncoderEngine, Engine
from .job import Busy, Closing, Event, Job, TooLong
from .listener import Once
from .metrics import Metrics
from .openapi import describe
from .replies import Choice, Reply, embeddings, usage
from .wire import INT64, AnyBody, ChatBody, CompletionBody, EmbeddingBody, Refused, Wish, parse

MAX_BODY = 1 << 20
MAX_TEXTS = 2048  # of one request for embeddings, as OpenAI has it
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
LAST = {"Connection": "close"}  # what is left of a body is not read
# What an engine says of a job that did not end well: the status, OpenAI's type, and the line for the client.
ENDINGS = {
    "timeout": (504, "timeout_error", "the answer took longer than this server allows"),
    "closing": (503, "server_error", "the server is shutting down"),
    "internal": (500, "server_error", "the server failed while it was answering"),
    "stuck": (400, "invalid_request_error", "the answer cannot go on in the form that was asked for"),
    "cancelled": (499, "server_error", "the request was cancelled"),
}


class Failure(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers
        self.error = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.error, self.status, dict(self.headers or {}))

    @classmethod
    def of(cls, error: ValueError) -> Failure:
        """What the user got wrong, or what the server cannot do now."""
        if isinstance(error, Busy):
            again = {"Retry-After": str(error.retry_after)}
            return cls(429, str(error), kind="rate_limit_error", code="queue_full", headers=again)
        if isinstance(error, Closing):
            return cls(503, str(error), kind="server_error")
        if isinstance(error, TooLong):
            return cls(400, str(error), code="context_length_exceeded")
        return cls(400, str(error), param=error.param if isinstance(error, Refused) else None)

    @classmethod
    def ending(cls, event: Event) -> Failure:
        status, kind, message = ENDINGS[event.error or "internal"]
        return cls(status, message, kind=kind, code=event.error)


def make_app(
    engines: Mapping[str, Engine], metrics: Metrics, *, api_key: str | None = None, timeout: float = 120.0
) -> FastAPI:
    """The application; its engines start with it, and are closed when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for engine in dict.fromkeys(engines.values()):  # several names may share one
            engine.start()
        yield
        for engine in dict.fromkeys(engines.values()):
            await asyncio.to_thread(engine.close)

    app = FastAPI(title="sublayer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Once)
    server = Server(engines, timeout)
    allowed = _Key(api_key)
    document = describe(engines, key=api_key is not None)

    @app.exception_handler(Failure)
    async def failed(request: Request, failure: Failure) -> Response:
        return failure.response()

    @app.exception_handler(HTTPException)
    async def lost(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return Failure(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return Failure.ending(Event(error="internal")).response()

    @app.get("/health")
    async def health() -> Response:
        well = all(engine.alive for engine in engines.values())
        return JSONResponse({"status": "ok" if well else "unavailable"}, 200 if well else 503)

    @app.get("/metrics")
    async def numbers(request: Request) -> Response:
        allowed.check(request)
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        allowed.check(request)
        return JSONResponse(document)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        allowed.check(request)
        return JSONResponse({"object": "list", "data": [server.card(name) for name in engines]})

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> Response:
        allowed.check(request)
        server.engine(name)
        return JSONResponse(server.card(name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        allowed.check(request)
        return await server.complete(request, CompletionBody)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        allowed.check(request)
        return await server.complete(request, ChatBody)

    @app.post("/v1/embeddings")
    async def embed(request: Request) -> Response:
        allowed.check(request)
        return await server.embed(request)

    return app


class Server:
    def __init__(self, engines: Mapping[str, Engine], timeout: float) -> None:
        self.engines, self.timeout = engines, timeout
        self.started = int(time.time())

    def card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "sublayer"}

    def engine(self, name: str) -> Engine:
        if name not in self.engines:
            known = ", ".join(self.engines)
            message = f"there is no model {name[:200]!r} here; there is {known}"
            raise Failure(404, message, param="model", code="model_not_found")
        return self.engines[name]

    async def complete(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        body = _parsed(kind, await _read(request, self.timeout))
        engine = self.engine(body.model)
        inbox: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()
        try:
            if isinstance(engine, EncoderEngine):
                raise Refused(f"{body.model} is an encoder; it serves /v1/embeddings only", "model")
            jobs = await asyncio.to_thread(self._jobs, engine, body, _poster(inbox))
            await asyncio.to_thread(engine.submit, jobs)
        except ValueError as error:
            raise Failure.of(error) from None
        reply = Reply(body.model, engine.lm.tokenizer, chat=isinstance(body, ChatBody), logprobs=body.top is not None)
        if body.stream:
            return Stream(jobs, _chunks(reply, jobs, inbox, body.usage_wanted, body.n or 1))
        choices = [Choice() for _ in jobs]
        await _collect(request, jobs, inbox, lambda index, event: choices[index].add(event))
        return JSONResponse(reply.whole(choices, _usage(jobs, choices, body.n or 1)))

    def _jobs(self, engine: Engine, body: Wish, poster: Callable[[int], Callable[[Event], None]]) -> list[Job]:
        """A job for each answer: `n` to each prompt, side by side."""
        lm = engine.lm
        special = {word: number for word in body.stops if (number := lm.tokenizer.id_of(word)) is not None}
        special = {word: number for word, number in special.items() if number in lm.tokenizer.special_ids()}
        stop = tuple(word for word in body.stops if word not in special)  # a special token is no part of any text
        constraint = body.constraint(lm.tokenizer)  # compiled in this thread, not in the engine's
        jobs: list[Job] = []
        for prompt in _prompts(engine, body):
            wanted = body.tokens_wanted
            if wanted is None:
                room = max(1, engine.room(len(prompt)))
                wanted = room if isinstance(body, ChatBody) else min(DEFAULT_TOKENS, room)
            for number in range(body.n or 1):
                seed = None if body.seed is None else (body.seed + number + INT64) % (2 * INT64) - INT64
                options = make_options(
                    max_new_tokens=wanted, seed=seed, eos_id=(*lm.eos_id, *special.values()), constraint=constraint,
                    **body.options(),
                )  # fmt: skip
                job = Job(
                    prompt=prompt, options=options, stop=stop, top=body.top, deliver=poster(len(jobs)),
                    adapter=engine.adapters.get(body.model),
                )  # fmt: skip
                job.deadline = job.submitted + self.timeout
                jobs.append(job)
        return jobs

    async def embed(self, request: Request) -> Response:
        body = _parsed(EmbeddingBody, await _read(request, self.timeout))
        engine = self.engine(body.model)
        inbox: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()
        texts = [body.input] if isinstance(body.input, str) else body.input
        post, deadline = _poster(inbox), time.monotonic() + self.timeout
        try:
            if not isinstance(engine, EncoderEngine):
                raise Refused(f"{body.model} is a {engine.kind}; embeddings need an encoder", "model")
            if body.dimensions not in (None, engine.lm.config.d_model):
                raise Refused(f"{body.model} gives {engine.lm.config.d_model} dimensions", "dimensions")
            if not 1 <= len(texts) <= MAX_TEXTS:
                raise Refused(f"input has {len(texts)} texts; give between 1 and {MAX_TEXTS}", "input")
            rows = await asyncio.to_thread(engine.lm.tokenizer.encode_batch, texts)
            adapter = engine.adapters.get(body.model)
            jobs = [
                Job(prompt=row, text=text, deliver=post(number), deadline=deadline, adapter=adapter)
                for number, (row, text) in enumerate(zip(rows, texts, strict=True))
            ]
            for job in jobs:
                engine.check(job)
            vectors: list[tuple[float, ...]] = [()] * len(jobs)

            def keep(index: int, event: Event) -> None:
                vectors[index] = event.vector

            # A batch at a time: a long list takes no more of the queue than a short one.
            for start in range(0, len(jobs), engine.limits.max_batch):
                part = jobs[start : start + engine.limits.max_batch]
                engine.submit(part)
                await _collect(request, part, inbox, keep)
        except ValueError as error:
            raise Failure.of(error) from None
        return JSONResponse(embeddings(body.model, vectors, body.encoding_format, sum(map(len, rows))))


class Stream(StreamingResponse):
    """Events of a server to its client. However it ends, nobody waits for the jobs any more."""

    def __init__(self, jobs: Sequence[Job], content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for job in self.jobs:
                job.cancel()


class _Key:
    def __init__(self, key: str | None) -> None:
        self.key = None if key is None else key.encode()

    def check(self, request: Request) -> None:
        if self.key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # The time that comparing takes tells nothing about the key.
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.key):
            again = {"WWW-Authenticate": "Bearer"}
            raise Failure(401, "the API key is missing or wrong", code="invalid_api_key", headers=again)


async def _read(request: Request, timeout: float) -> bytes:
    """The body, as long as it is JSON, not too large, and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a form of another site cannot send
        raise Failure(415, "send the request as JSON, with Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY:
                    raise Failure(413, f"the body is larger than {MAX_BODY >> 20} MB", headers=LAST)
    except ClientDisconnect:
        raise Failure.ending(Event(error="cancelled")) from None
    except TimeoutError:
        raise Failure(408, f"the body did not come within {timeout:g} seconds", headers=LAST) from None
    return bytes(body)


def _parsed(kind: type[AnyBody], body: bytes) -> AnyBody:
    try:
        return parse(kind, body)
    except ValueError as error:
        raise Failure.of(error) from None


def _prompts(engine: Engine, body: Wish) -> list[list[int]]:
    tokenizer = engine.lm.tokenizer
    if isinstance(body, ChatBody):
        text = engine.lm.chat_prompt([message.plain() for message in body.messages])
        return [tokenizer.encode(text, special=False)]  # the template itself writes what stands around a text
    assert isinstance(body, CompletionBody)
    if not body.prompts:
        raise Refused("prompt is an empty list; give at least one text", "prompt")
    engine.check_count(len(body.prompts) * (body.n or 1))
    return [tokenizer.encode(one) if isinstance(one, str) else one for one in body.prompts]


def _poster(inbox: asyncio.Queue[tuple[int, Event | None]]) -> Callable[[int], Callable[[Event], None]]:
    """For each job, how its events come from the engine's thread to this one."""
    loop = asyncio.get_running_loop()

    def poster(index: int) -> Callable[[Event], None]:
        def post(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

        return post

    return poster


async def _collect(
    request: Request,
    jobs: Sequence[Job],
    inbox: asyncio.Queue[tuple[int, Event | None]],
    keep: Callable[[int, Event], None],
) -> None:
    """Wait for all jobs, unless the client goes away, or one of them fails."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        inbox.put_nowait((0, None))

    watcher = asyncio.create_task(watch())
    try:
        left = len(jobs)
        while left:
            index, event = await inbox.get()
            if event is None:
                raise Failure.ending(Event(error="cancelled"))
            if event.error is not None:
                raise Failure.ending(event)
            keep(index, event)
            left -= event.last
    finally:
        for job in jobs:
            job.cancel()
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _chunks(
    reply: Reply, jobs: Sequence[Job], inbox: asyncio.Queue[tuple[int, Event | None]], usage_wanted: bool, times: int
) -> AsyncIterator[str]:
    """The answers as events, in the order in which their pieces come."""
    more: dict[str, Any] = {"usage": None} if usage_wanted else {}
    choices = [Choice() for _ in jobs]
    if reply.chat:
        for index in range(len(jobs)):
            yield _line(reply.opening(index) | more)
    left = len(jobs)
    while left:
        index, event = await inbox.get()
        assert event is not None
        if event.error is not None:
            yield _line(Failure.ending(event).error)
            return
        choices[index].add(event)
        left -= event.last
        yield _line(reply.piece(index, event) | more)
    if usage_wanted:
        yield _line(reply.closing(_usage(jobs, choices, times)))
    yield "data: [DONE]\n\n"


def _usage(jobs: Sequence[Job], choices: Sequence[Choice], times: int) -> dict[str, int]:
    """A prompt counts once, however many answers it gets."""
    return usage(sum(len(job.prompt) for job in jobs[::times]), sum(choice.tokens for choice in choices))


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
