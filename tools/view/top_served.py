"""`memmgr top --serve`: the full screen in a browser of this machine, by textual-serve.

The page shows a process's memory on a port that every user of the machine can reach, so:

- it listens on the loopback address only;
- its address holds a token of 256 random bits, and no request is answered without it;
- a request has to name this address as its host, else a page under another name for the loopback address could read it;
- it is read-only: a browser sends keys to `memmgr top`, which changes no state, and only GET is accepted;
- the page may not load anything from elsewhere, and sends no referrer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import cast

import aiohttp_jinja2
import jinja2
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from textual_serve.app_service import AppService
from textual_serve.server import Server

from memmgr.tools.common.usage_error import UsageError

ADDRESS = "127.0.0.1"
# The page is textual-serve's, which is dark. Where the browser prefers light it is made so, and asks for a screen that is.
_LIGHT = """<style>@media (prefers-color-scheme: light) { body, .shade { background: #e0e0e0 !important; }
.intro { background: #fff !important; color: #222 !important; } .intro svg { display: none; } }</style>
<script>if (matchMedia("(prefers-color-scheme: light)").matches)
document.getElementById("terminal").dataset.sessionWebsocketUrl += "/light";</script>"""
CLOSING_SECONDS = 1.0  # for a page's process to end by itself, once asked and once more


def serve(words: Sequence[str], port: int) -> None:
    """Says the page's address and serves it until Ctrl-C.

    Args:
        words: the arguments of `memmgr top`, which runs once for every open page.
        port: 0 for any that is free.

    Raises:
        UsageError: the port cannot be had.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
            listening.listen()  # before the address is printed: a browser that connects early waits for the server
        except OSError as error:
            raise UsageError(f"--serve: port {port}: {error.strerror}") from None
        port = listening.getsockname()[1]
        token = secrets.token_urlsafe(32)
        print(f"http://{ADDRESS}:{port}/{token}/   (until Ctrl-C)", flush=True)
        command = "exec " + shlex.join([sys.executable, "-P", "-m", "memmgr.tools.cli", "top", *words])
        app = application(command, port, token)
        web.run_app(app, sock=listening, print=None, access_log=None, shutdown_timeout=CLOSING_SECONDS)


class _Page(AppService):
    """The process behind one open page. It ends with the page. A process whose page was closed while it drew used to
    stay for ever, since its output was not read any more.
    """

    async def stop(self) -> None:
        """Signals the process to end; one that does not is killed."""
        process = self._process
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(super().stop(), CLOSING_SECONDS)
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), CLOSING_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


class _Pages(Server):
    """textual-serve's page, over processes that end with it."""

    async def handle_index(self, request: web.Request) -> web.Response:
        """The page."""
        page = cast(web.Response, await super().handle_index(request))  # its decorator makes one of the data
        page.text = (page.text or "").replace("</body>", _LIGHT + "</body>")
        return page

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """One page, from its opening to its end."""
        websocket = web.WebSocketResponse(heartbeat=15)
        await websocket.prepare(request)

        async def hang_up() -> None:
            await websocket.close()

        light = "export TEXTUAL_THEME=textual-light; " if request.path.endswith("/light") else ""
        page = _Page(
            light + self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=hang_up,
            download_manager=self.download_manager,
        )
        width, height = (_number(request.query.get(name, ""), usual) for name, usual in (("width", 80), ("height", 24)))
        try:
            await page.start(width, height)
            await self._process_messages(websocket, page)
        finally:
            await page.stop()
        return websocket


def _number(word: str, usual: int) -> int:
    return min(int(word), 1000) if word.isascii() and word.isdecimal() and len(word) < 9 else usual


def application(command: str, port: int, token: str) -> web.Application:
    """The pages of textual-serve behind our door. Its downloads are left out: `top` has none."""
    server = _Pages(command, host=ADDRESS, port=port, title="memmgr top")
    pages = web.Application()
    aiohttp_jinja2.setup(pages, loader=jinja2.FileSystemLoader(server.templates_path))
    pages.add_routes(
        [
            web.get("/", server.handle_index, name="index"),
            web.get("/ws", server.handle_websocket, name="websocket"),
            web.get("/ws/light", server.handle_websocket),
            web.static("/static", server.statics_path, name="static"),
        ]
    )
    door = web.Application(middlewares=[_door(port, token)])
    door.on_response_prepare.append(_closed_page(port))
    door.add_subapp(f"/{token}", pages)
    return door


def _door(port: int, token: str) -> Middleware:
    hosts = {f"{ADDRESS}:{port}", f"localhost:{port}"}
    origins = {f"http://{host}" for host in hosts}

    @web.middleware
    async def door(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.path.split("/", 2)[1]
        known = compare_digest(given.encode(), token.encode())
        from_here = request.headers.get("Host") in hosts and request.headers.get("Origin", min(origins)) in origins
        if not (known and from_here):
            raise web.HTTPForbidden(
                text="memmgr top: the address with its token, on this machine, is what opens this\n"
            )
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        return await handler(request)

    return door


def _closed_page(port: int) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    sources = f"'self' ws://{ADDRESS}:{port}"
    policy = (
        f"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
        f"img-src 'self' data:; connect-src {sources}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )

    async def close(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Content-Security-Policy"] = policy
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"

    return close
