"""Clients of the load test: some ask and check the answer, some hang up, some talk nonsense."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.load_models import Case

NONSENSE = [
    b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe\x00", b"[" * 50_000, b'{"a":' * 5000, b'{"model":1,"prompt":"a"}',
    b'{"model":"../etc","prompt":"a"}', b'{"model":"MODEL","prompt":"\\ud800"}', b'{"model":"MODEL","prompt":"\xc3"}',
    b'{"model":"MODEL","prompt":[1e99]}', b'{"model":"MODEL","prompt":[-1]}', b'{"model":"MODEL","prompt":[[]]}',
    b'{"model":"MODEL","prompt":"a","max_tokens":1e9}', b'{"model":"MODEL","prompt":"a","max_tokens":"many"}',
    b'{"model":"MODEL","prompt":"a","temperature":NaN}', b'{"model":"MODEL","prompt":"a","n":1000000}',
    b'{"model":"MODEL","prompt":"a","stop":["","",""]}', b'{"model":"MODEL","prompt":"a","logit_bias":{"1e3":5}}',
    b'{"model":"MODEL","prompt":"a","model":"MODEL","x":1}', b'{"model":"MODEL","messages":[{"role":5}]}',
    b'{"model":"MODEL","input":[["a"]]}', b'{"model":"MODEL","prompt":"' + b"a" * 100_000 + b'"}',
]  # fmt: skip
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"\x00" * 4096,
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A: b\r\n" * 20_000,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]  # fmt: skip


class Wrong(Exception):
    """What a server must not do."""


class Client:
    """One user of the server. Every method asks once, and gives the status that came back."""

    def __init__(self, port: int, key: str, cases: list[Case], endless: str, seed: int) -> None:
        self.port, self.key, self.cases, self.endless = port, key, cases, endless
        self.random = random.Random(seed)

    def ask(self) -> str:
        """A well-behaved client: the answer must be the one that the model gives alone."""
        case, whole = self.random.choice(self.cases), self.random.random() < 0.5
        body = case.body if whole or case.path == "/v1/embeddings" else case.body | {"stream": True}
        connection = self._connection()
        try:
            connection.request("POST", case.path, json.dumps(body), self._headers())
            answer = connection.getresponse()
            return self._check(case, body, answer.status, answer.read())
        finally:
            connection.close()

    def hang_up(self) -> str:
        """Leave in the middle: of the answer, of the wait for it, or of the question."""
        with self._socket() as raw:
            question = self._long_question(stream=self.random.random() < 0.7)
            if self.random.random() < 0.2:
                raw.sendall(question[: self.random.randrange(len(question))])
                return "in the question"
            raw.sendall(question)
            answer = b""
            for _ in range(self.random.randint(0, 12)):
                piece = raw.recv(400)
                answer += piece
                if not piece:
                    return "after the answer"
            if answer and not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")):
                raise Wrong(f"a long question was answered with {answer[:60]!r}")
            if self.random.random() < 0.5:  # a reset instead of a farewell
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        return "in the answer"

    def stall(self) -> str:
        """Ask for a long answer, and leave it unread for a while."""
        with self._socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.sendall(self._long_question(stream=True))
            time.sleep(1 + 2 * self.random.random())
        return "unread"

    def form(self) -> str:
        """Ask for an answer of a form that nobody has asked for before; it has that form if it came to its end."""
        case = self.random.choice([case for case in self.cases if case.path == "/v1/completions"])
        form = f"[a-c]{{1,9}}-{self.random.randrange(10**9)}"
        body = case.body | {"regex": form, "max_tokens": 40}
        status, content = self._post(case.path, json.dumps(body).encode())
        if status == 429 or (status == 400 and b"no end token" in content):
            return str(status)
        if status != 200:
            raise Wrong(f"{status} for {body}: {content[:300]!r}")
        choice = json.loads(content)["choices"][0]
        if choice["finish_reason"] == "stop" and not re.fullmatch(form, choice["text"]):
            raise Wrong(f"{choice['text']!r} is not of the form {form}")
        return "200"

    def nonsense(self) -> str:
        body = self.random.choice(NONSENSE).replace(b"MODEL", self.endless.encode())
        path = self.random.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/nothing"])
        status, content = self._post(path, body)
        if not 400 <= status < 500:
            raise Wrong(f"{status} for {body[:80]!r} to {path}")
        _error(content)
        return str(status)

    def mutate(self) -> str:
        """A request that was right, with some of its bytes changed: it may be right still."""
        case = self.random.choice(self.cases)
        body = bytearray(json.dumps(case.body).encode())
        for _ in range(self.random.randint(1, 4)):
            body[self.random.randrange(len(body))] = self.random.randrange(256)
        status, content = self._post(case.path, bytes(body))
        if status == 200:
            json.loads(content)
        elif 400 <= status < 500:
            _error(content)
        else:
            raise Wrong(f"{status} for {bytes(body)!r}")
        return str(status)

    def huge(self) -> str:
        """More than the server reads, told beforehand or in chunks that never say how much is to come."""
        with self._socket() as raw:
            chunked = self.random.random() < 0.5
            raw.sendall(self._head("/v1/completions", None if chunked else 3 << 20))
            piece = b"a" * (1 << 16)
            piece = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
            try:
                for _ in range(48):
                    raw.sendall(piece)
                answer = raw.recv(1 << 16)
            except (ConnectionResetError, BrokenPipeError):
                return "cut off"
        if not answer.startswith(b"HTTP/1.1 413"):
            raise Wrong(f"a body of 3 MB was answered with {answer[:60]!r}")
        return "413"

    def garbage(self) -> str:
        """What is no HTTP at all."""
        with self._socket() as raw:
            try:
                raw.sendall(self.random.choice(GARBAGE))
                raw.shutdown(socket.SHUT_WR)
                answer = raw.recv(1 << 16)
            except (ConnectionResetError, BrokenPipeError):
                return "cut off"
        if answer and not answer.startswith(b"HTTP/1.1 4"):
            raise Wrong(f"garbage was answered with {answer[:60]!r}")
        return answer[9:12].decode() or "cut off"

    def slow(self) -> str:
        """A question that comes in small pieces, and sometimes not to its end; if it does, the answer is right."""
        case = self.random.choice(self.cases)
        body = json.dumps(case.body).encode()
        pieces = list(_pieces(self._head(case.path, len(body)) + body, 12))
        whole = self.random.random() < 0.7
        with self._socket() as raw:
            for piece in pieces if whole else pieces[: self.random.randrange(len(pieces))]:
                raw.sendall(piece)
                time.sleep(self.random.random() / 8)
            if not whole:
                return "given up"
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            return self._check(case, case.body, answer.status, answer.read())

    def keyless(self) -> str:
        case = self.random.choice(self.cases)
        connection = self._connection()
        connection.request("POST", case.path, json.dumps(case.body), self._headers() | {"Authorization": "Bearer no"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 401:
            raise Wrong(f"{answer.status} without the key")
        _error(content)
        return "401"

    def _long_question(self, stream: bool) -> bytes:
        prompt = "a" * self.random.randint(1, 300)
        body = json.dumps({"model": self.endless, "prompt": prompt, "max_tokens": 250, "stream": stream}).encode()
        return self._head("/v1/completions", len(body)) + body

    def _check(self, case: Case, body: dict[str, Any], status: int, content: bytes) -> str:
        if status == 429:  # the queue is full: that is an answer, too
            _error(content)
            time.sleep(self.random.random())
        elif status != 200:
            raise Wrong(f"{status} for {body}: {content[:300]!r}")
        else:
            said = _streamed(content) if body.get("stream") else _whole(content)
            near = isinstance(said, list) and all(abs(a - b) < 1e-4 for a, b in zip(said, case.expected, strict=True))
            if said != case.expected and not near:
                raise Wrong(f"{body}: {said!r} instead of {case.expected!r}")
        return str(status)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request("POST", path, body, self._headers())
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def _socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    def _head(self, path: str, length: int | None) -> bytes:
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            size,
            *(f"{name}: {value}" for name, value in self._headers().items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


def _whole(content: bytes) -> Any:
    answer = json.loads(content)
    if answer["object"] == "list":
        return answer["data"][0]["embedding"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def _streamed(content: bytes) -> str:
    events = content.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise Wrong(f"the stream ended with {events[-2:]}")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def _error(content: bytes) -> None:
    error = json.loads(content)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        raise Wrong(f"an error of another form: {content[:200]!r}")


def _pieces(text: bytes, count: int) -> Iterator[bytes]:
    size = -(-len(text) // count)
    for start in range(0, len(text), size):
        yield text[start : start + size]
