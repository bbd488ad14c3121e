"""uvicorn, as this server needs it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

import uvicorn
from h11 import LocalProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engine import Engine


class Listener(uvicorn.Server):
    """uvicorn, which tells the engines that it ends before it waits for connections: some wait in their queues."""

    def __init__(self, config: uvicorn.Config, engines: Mapping[str, Engine]) -> None:
        super().__init__(config)
        self.engines = engines

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for engine in dict.fromkeys(self.engines.values()):
            engine.drain()
        await super().shutdown(sockets)


class Once:
    """uvicorn itself answers a body that is no HTTP, while we read it; ours would then be the second answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def first(message: Message) -> None:
            with suppress(LocalProtocolError):
                await send(message)

        await self.app(scope, receive, first)
