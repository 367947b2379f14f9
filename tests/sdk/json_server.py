"""A simple HTTP server on this machine, which is not sojourn."""

from __future__ import annotations

from json_handler import HandlerServer, JsonHandler


class JsonServer(HandlerServer):
    """Answers GET from ``pages`` (404 for others), and POST with ``status`` and ``{}``. ``posts`` has path,
    body and ``Authorization`` of each POST."""

    def __init__(self):
        self.pages = {}
        self.status = 200
        self.posts = []
        outer = self

        class Handler(JsonHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                self.answer(outer.pages.get(path), 200 if path in outer.pages else 404)

            def do_POST(self):
                outer.posts.append((self.path, self.read_json(), self.headers.get("authorization")))
                self.answer({}, outer.status)

        super().__init__(Handler)

    @property
    def bodies(self):
        return [body for _, body, _ in self.posts]
