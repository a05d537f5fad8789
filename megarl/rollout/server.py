"""The rollout server: prompts over HTTP to one vLLM engine.

    POST /generate  {"prompts": ["..."]}  ->  {"sequences": ["..."], "finish_reasons", "num_tokens", "seed"}
    GET  /health                          ->  {"status": "ok"}, or 503 once the engine is dead

A refusal is {"error": message}. It concerns its own request alone.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from megarl.errors import ConfigError, WorkerError, explain
from megarl.rollout.server_engine import ServerEngine
from megarl.rollout.server_requests import MAX_BODY_BYTES, RequestError, parse_request

GRACE_S = 5  # requests in flight when the server is told to stop have so long to end
_READ_AT_MOST = 8 * MAX_BODY_BYTES  # of a body that is too large
_GONE = 499  # nobody reads it: the client has hung up
_POLL_S = 0.2


@dataclass(frozen=True)
class Access:
    """Who may generate. Without a token only this machine may, and only under its own name."""

    token: str = ""

    def check(self, request: Request) -> None:
        """Raise RequestError: 401 without the token, 403 under a foreign name, 415 for what a web page could send unasked."""
        if self.token:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
                raise RequestError(401, explain("no valid token", where=request.url.path, expected="header Authorization: Bearer TOKEN"))
        elif not is_loopback(request.url.hostname or ""):
            # A page on the web can give its own name this machine's address, and then read the answers.
            got = (request.url.hostname or "")[:80]
            raise RequestError(403, explain("not a name of this machine", where="header Host", got=got, expected="localhost or 127.0.0.1"))
        content = request.headers.get("content-type", "")
        if request.method == "POST" and content.partition(";")[0].strip().lower() != "application/json":
            expected = "Content-Type: application/json"
            raise RequestError(415, explain("not sent as JSON", where=request.url.path, got=content[:80], expected=expected))


def is_loopback(host: str) -> bool:
    """True for names and addresses that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def make_app(engine: ServerEngine, access: Access) -> FastAPI:
    """The HTTP side of ``engine``."""
    app = FastAPI(title="megarl rollout server", openapi_url=None)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        access.check(request)
        asked = parse_request(await _body(request), engine.defaults, engine.vocabulary)
        drawn = await _while_connected(request, engine.generate(asked))
        if drawn is None:
            return Response(status_code=_GONE)
        answers, seed = drawn
        return JSONResponse(
            {
                "sequences": [answer.text for answer in answers],
                "finish_reasons": [answer.finish_reason for answer in answers],
                "num_tokens": [answer.tokens for answer in answers],
                "seed": seed,
            }
        )

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "dead"}, 503) if engine.dead else JSONResponse({"status": "ok"})

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return JSONResponse({"error": str(error)}, error.status)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        got = f"{request.method} {request.url.path}"[:200]
        message = explain(str(error.detail), got=got, expected="POST /generate or GET /health")
        return JSONResponse({"error": message}, error.status_code, headers=error.headers)

    return app


async def _body(request: Request) -> bytes:
    """The request's body. Raises RequestError 413 for one that is too large, of which nothing is kept."""
    said = request.headers.get("content-length", "")
    parts, size = [], int(said) if said.isdecimal() else 0
    if size <= _READ_AT_MOST:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= MAX_BODY_BYTES:
                parts.append(part)
            elif size > _READ_AT_MOST:
                break
            else:  # read on: many clients look for an answer only when they have sent all
                parts.clear()
    if size > MAX_BODY_BYTES:
        expected = f"at most {MAX_BODY_BYTES} bytes"
        raise RequestError(413, explain("the request is too large", where=request.url.path, expected=expected, do="send fewer prompts"))
    return b"".join(parts)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What ``work`` returns; None, with the work broken off, when the client hangs up first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds ``port`` (0: a free one) and does not listen yet, so that clients are refused until the server is ready.

    Raises ConfigError when the port is taken or the address isn't this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        raise _no_port(host, port, error) from error
    return bound


def _no_port(host: str, port: int, error: Exception) -> ConfigError:
    do = "name another --port (0 takes a free one), or stop the process that has it"
    return ConfigError(explain("the server can't have its port", where="--host, --port", got=f"{host}:{port}: {error}", do=do))


async def serve(engine: ServerEngine, access: Access, bound: socket.socket, stopping: Callable[[], bool]) -> None:
    """Answer until a signal ends uvicorn, or ``stopping`` says so. The log says when the server is ready.

    Raises ConfigError when another process listens on the port by now, WorkerError when the engine dies.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen()
    except OSError as error:
        raise _no_port(host, port, error) from error
    app = make_app(engine, access)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2 * GRACE_S,
        server_header=False,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    said = ending = False
    while not task.done():
        if server.started and not said:
            logging.getLogger().info("Rollout server started on port %d", port)
            said = True
        server.should_exit = server.should_exit or stopping() or engine.dead
        if server.should_exit and not ending:
            asyncio.get_running_loop().call_later(GRACE_S, engine.break_off)
            ending = True
        await asyncio.wait({task}, timeout=_POLL_S if said else _POLL_S / 10)
    await task
    if engine.dead and not stopping():
        raise WorkerError(explain("vLLM's engine died", where=engine.settings.model_dir, do="read the lines above, then start again"))
