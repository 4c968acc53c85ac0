"""The page and its news, on the loopback address.

The page asks `POST /news` again and again, with the positions up to which it knows the runs (see
`follow`). All else are files: the page itself, and the library that draws, which comes with the package
`plotly`. So the page needs no network.

Only this machine can reach the address. A page of another site, whose name could be made to lead here,
names itself in the header `Host`, and gets no answer.
"""

from __future__ import annotations

import errno
import http
import importlib.util
import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pergrad.lab import files
from pergrad.lab.errors import LabError
from pergrad.lab.watch import follow

HOSTS = {"127.0.0.1", "localhost"}
LONGEST = 1 << 20  # bytes of a question: some thousand runs
STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"
)


def library() -> Path:
    """The file of plotly.js that the package plotly brings along."""
    found = importlib.util.find_spec("plotly")
    file = None if found is None or found.origin is None else Path(found.origin).parent
    file = None if file is None else file / "package_data" / "plotly.min.js"
    if file is None or not file.exists():
        raise LabError("the charts need the package plotly: pip install 'pergrad[lab]'")
    return file


def make(paths: Sequence[Path], port: int) -> Server:
    """A server that listens; `port` 0 takes one that is free. `serve_forever` answers."""
    for path in paths:
        if path.exists() and not path.is_dir():
            raise LabError(f"{path} is a file. Name the directory of a run, or one that contains runs.")
    if not 0 <= port <= 65535:
        raise LabError(f"a port is a number from 0 to 65535, not {port}.")
    try:
        return Server(paths, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LabError(
                f"port {port} is in use, perhaps by another `pergrad watch`. Choose another --port; "
                "--port 0 takes one that is free."
            ) from error
        raise LabError(
            f"cannot listen at port {port}: {error.strerror}. Choose another --port."
        ) from error


class Server(ThreadingHTTPServer):
    """Answers with the page, and with the news of the runs in `paths`."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        self.paths = tuple(paths)
        self.files = {
            "/": (STATIC / "watch.html", "text/html; charset=utf-8"),
            "/watch.css": (STATIC / "watch.css", "text/css; charset=utf-8"),
            "/watch.js": (STATIC / "watch.js", "text/javascript; charset=utf-8"),
            "/plotly.min.js": (library(), "text/javascript; charset=utf-8"),
        }
        super().__init__(("127.0.0.1", port), Answer)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that is closed in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    timeout = 30

    @property
    def _page(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_for_us():
            self._refuse(http.HTTPStatus.FORBIDDEN)
        elif path in self._page.files:
            file, kind = self._page.files[path]
            self._send(file.read_bytes(), kind)
        elif path == "/favicon.ico":
            self._send(b"", "image/x-icon", http.HTTPStatus.NO_CONTENT)
        else:
            self._refuse(http.HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if not self._is_for_us():
            self._refuse(http.HTTPStatus.FORBIDDEN)
        elif self.path != "/news":
            self._refuse(http.HTTPStatus.NOT_FOUND)
        elif (since := self._question()) is None:
            self._refuse(http.HTTPStatus.BAD_REQUEST)
        else:
            told = files.to_json(follow.news(self._page.paths, since))
            self._send(told.encode(errors="backslashreplace"), "application/json")

    def _is_for_us(self) -> bool:
        return self.headers.get("Host", "").partition(":")[0] in HOSTS

    def _question(self) -> dict[str, Any] | None:
        """The positions that the page knows; None if the question is not such a mapping."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST:
            return None
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return None
        return asked if isinstance(asked, dict) else None

    def _refuse(self, status: http.HTTPStatus) -> None:
        self.close_connection = True
        self._send(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8", status)

    def _send(self, content: bytes, kind: str, status: http.HTTPStatus = http.HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal shows the address alone."""
