"""`memmgr top --serve`: the same view in a browser, only for a reader with its address."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from memmgr.config.extras import pip_line
from memmgr.tools import cli
from memmgr.tools.verbs import top
from watch import lines

aiohttp = pytest.importorskip("aiohttp", reason="the page is the extra `serve`")
pytest.importorskip("textual_serve", reason="the page is the extra `serve`")

COMMAND = [sys.executable, "-P", "-m", "memmgr.tools.cli", "top", "4242", "--serve"]


class Served:
    """A server in a process of its own, and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.port = urlsplit(url).port
        self.token = urlsplit(url).path.strip("/")

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"127.0.0.1:{self.port}", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")
        connection.close()
        return found

    def pages(self) -> list[psutil.Process]:
        """The processes that draw."""
        return psutil.Process(self.process.pid).children(recursive=True)


def _answers(server: Served) -> bool:
    try:
        server.get("/")
    except OSError:
        return False
    return True


@pytest.fixture
def served(runtime: object) -> Iterator[Served]:
    with (
        lines.served(4242, lines.lines()),
        subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        assert said.startswith("http://127.0.0.1:"), process.stderr.read()
        try:
            server = Served(process, said.split()[0])
            # The address is printed before asyncio's loop is made: an interrupt in between ends in a traceback.
            assert until(lambda: _answers(server))
            yield server
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        except BaseException:
            process.kill()  # else leaving the block waits for it
            raise
        assert process.returncode in (0, -signal.SIGKILL) and errors == "", errors


def until(reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)
    return reached()


def test_the_door(served: Served) -> None:
    page = f"/{served.token}/"
    assert len(served.token) >= 43, "256 bits"
    status, headers, text = served.get(page)
    assert status == 200 and "memmgr top" in text and served.get(page + "static/js/textual.js")[0] == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Referrer-Policy"] == "no-referrer"
    assert served.get(page, Host=f"localhost:{served.port}", Origin=f"http://localhost:{served.port}")[0] == 200
    for path in (
        "/",
        "/ws",
        "/static/js/textual.js",
        "/x" + page,
        f"/{served.token[:-1]}/",
        f"/{served.token}x/",
        "/favicon.ico",
    ):
        status, _, text = served.get(path)
        assert status == 403 and served.token not in text, path
    for host in (
        "evil.example",
        f"evil.example:{served.port}",
        "127.0.0.1:1",
        f"127.0.0.1:{served.port}.evil.example",
        "",
    ):
        assert served.get(page, Host=host)[0] in (400, 403), host
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    assert served.get(page + "ws", Origin="http://evil.example", **upgrade, **key)[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert served.get(page, method=method)[0] == 405, method
    assert served.get(page + "download/x")[0] == 404 and served.pages() == []


def test_only_this_machine_can_reach_it(served: Served) -> None:
    listening = [c for c in psutil.Process(served.process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", served.port)]


async def _watch(
    served: Served, wanted: bytes, then: Callable[[], None] = lambda: None, *, stream: str = "ws"
) -> bytes:
    """Opens the page's stream, as its script does, until the text is there."""
    shown = b""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(served.url.replace("http", "ws") + f"{stream}?width=80&height=24") as connected,
    ):
        while wanted not in shown:
            message = await connected.receive(timeout=60)
            assert message.type == aiohttp.WSMsgType.BINARY, message
            shown += message.data
        then()
    return shown


def test_the_page_shows_what_the_terminal_shows_and_its_process_ends_with_it(served: Served) -> None:
    shown = asyncio.run(_watch(served, b"Net.first.1"))
    assert b"budget 8 MB" in shown and b"4242" in shown
    assert until(lambda: served.pages() == [])


def test_a_page_that_prefers_light_is_light(served: Served) -> None:
    """Its script asks for another stream."""
    light, page = b"48;2;224;224;224", served.get(f"/{served.token}/")[2]
    assert "(prefers-color-scheme: light)" in page and '"/light"' in page and page.count("</body>") == 1
    assert light in asyncio.run(_watch(served, b"Net.first.1", stream="ws/light"))
    assert light not in asyncio.run(_watch(served, b"Net.first.1"))


def test_a_killed_server_leaves_no_process(served: Served) -> None:
    found: list[psutil.Process] = []

    def kill() -> None:
        found.extend(served.pages())
        served.process.kill()

    with pytest.raises((AssertionError, aiohttp.ClientError)):  # it was hung up
        asyncio.run(_watch(served, b"budget 8 MB", kill))
        raise AssertionError
    assert len(found) == 1 and until(lambda: not any(one.is_running() for one in found))


def test_in_a_browser(served: Served) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here")

    async def look(debugger: str) -> list[str]:
        async with aiohttp.ClientSession() as session:
            async with session.get(debugger + "/json") as answer:
                tab = next(t for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as page:

                async def call(number: int, method: str, **how: Any) -> Any:
                    await page.send_json({"id": number, "method": method, "params": how})
                    while (said := await page.receive_json(timeout=60)).get("id") != number:
                        if said.get("method") == "Network.requestWillBeSent":
                            asked.append(said["params"]["request"]["url"])
                    return said["result"]

                asked: list[str] = []
                await call(1, "Network.enable")
                await call(2, "Page.navigate", url=served.url)
                deadline = time.monotonic() + 60
                drawn = ""
                while "first-byte" not in drawn and time.monotonic() < deadline:
                    found = await call(3, "Runtime.evaluate", expression="document.body ? document.body.className : ''")
                    drawn = str(found["result"].get("value"))
                    await asyncio.sleep(0.1)
                assert "first-byte" in drawn, "nothing was drawn"
                return asked

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        with subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        ) as browser:
            assert browser.stderr is not None
            try:
                found = (re.search(r"listening on ws://([^/]+)/", line) for line in browser.stderr)
                asked = asyncio.run(look("http://" + next(match[1] for match in found if match)))
            finally:
                browser.kill()
    assert served.url in asked
    assert until(lambda: served.pages() == []), "it ends with the browser"


# -- bad input --


def _fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["top", "4242", *words]) == 2
    return capsys.readouterr().err


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no process 4242" in _fails(capsys, "--serve") or "no open memmgr budget" in _fails(capsys, "--serve")
    for other in (["--once"], ["--json"], ["--ascii"], ["--picture", "x.svg"]):
        assert "--serve is the full screen" in _fails(capsys, "--serve", "0", *other)
    with pytest.raises(SystemExit):
        cli.main(["top", "--serve=70000"])
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    assert pip_line("serve") in _fails(capsys, "--serve")


def test_a_port_that_is_taken(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"port {served.port}: Address already in use" in _fails(capsys, f"--serve={served.port}")
