"""A simple HTTP server on this machine, which is not sojourn."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer:
    """Answers GET from ``pages`` with ``page_status`` (404 for others), and POST with ``status`` and
    ``answer`` after ``delay_s``. ``posts`` has path, body and ``Authorization`` of each POST; ``gets`` is the
    number of GETs."""

    def __init__(self, pages=None, answer=None):
        self.pages = pages or {}
        self.answer = answer or {}
        self.page_status = self.status = 200
        self.delay_s = 0.0
        self.posts = []
        self.gets = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.gets += 1
                path = self.path.partition("?")[0]
                self.say(outer.page_status if path in outer.pages else 404, outer.pages.get(path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.posts.append((self.path, json.loads(body), self.headers.get("authorization")))
                time.sleep(outer.delay_s)
                self.say(outer.status, outer.answer)

            def say(self, status, page):
                body = page if isinstance(page, bytes) else json.dumps(page).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def bodies(self):
        return [body for _, body, _ in self.posts]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()
