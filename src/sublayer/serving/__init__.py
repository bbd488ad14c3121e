"""A server that speaks OpenAI's language, and answers many clients at once. It needs the extra sublayer[serve]."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .engine import Limits
from .metrics import Metrics
from .models import load_engines

if TYPE_CHECKING:
    from .listener import Listener

__all__ = ["Limits", "make_server", "named", "serve"]
KEY = "SUBLAYER_API_KEY"


def serve(models: Sequence[str], *, host: str = "127.0.0.1", port: int = 8000, **settings: Any) -> None:
    """Load the models, say what they take, and answer until interrupted; the settings are those of `make_server`."""
    server = make_server(models, host=host, port=port, **settings)
    # Opened here, so that a port in use is one clear line; the server would end the process itself.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error}; give another --port or --host") from None
        print(f"listening on http://{host}:{listener.getsockname()[1]}/v1", flush=True)
        server.run(sockets=[listener])


def make_server(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    timeout: float = 120.0,
    api_key: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    grace: float = 30.0,
) -> Listener:
    """The server with its models loaded, not yet listening. `grace` is how long it waits for answers when it ends."""
    try:
        import uvicorn

        from .app import make_app
        from .listener import Listener
    except ImportError as error:
        raise ValueError(f"serving needs the package {error.name!r}: pip install 'sublayer[serve]'") from None
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; give the seconds that an answer may take")
    metrics = Metrics()
    engines = load_engines(named(models), limits or Limits(), metrics, device, dtype)
    for engine in dict.fromkeys(engines.values()):
        print(engine.plan(), flush=True)
    app = make_app(engines, metrics, api_key=api_key or os.environ.get(KEY) or None, timeout=timeout)
    settings = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=max(1, round(grace))
    )
    return Listener(settings, engines)


def named(models: Sequence[str]) -> dict[str, str]:
    """Folders by the names they are served under: NAME=FOLDER, or the last part of the folder's path."""
    out: dict[str, str] = {}
    for text in models:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            path = Path(text).expanduser()
            path = path.resolve() if path.exists() else path
            name, folder = path.stem if path.suffix == ".gguf" else path.name, text
        if not name or not folder:
            raise ValueError(f"{text!r} names no model; give a folder, or NAME=FOLDER")
        if name in out:
            raise ValueError(f"two models are called {name!r}; give one another name: NAME={folder}")
        out[name] = folder
    if not out:
        raise ValueError("there is no model to serve; give at least one folder")
    return out
