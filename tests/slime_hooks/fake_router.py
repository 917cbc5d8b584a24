"""The calls of sglang-router that we make, over HTTP."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeRouter:
    def __init__(self, *, listed=True):
        self.workers = []
        self.seen = []
        self.on_remove = lambda url: None
        self.healthy = listed
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                listed = [
                    {"id": f"id-{u}".replace("/", "-"), "url": u, "is_healthy": outer.healthy} for u in outer.workers
                ]
                self._answer({"workers": listed})

            def do_DELETE(self):
                wanted = self.path.rpartition("/")[2]
                for url in list(outer.workers):
                    if f"id-{url}".replace("/", "-") == wanted:
                        outer.on_remove(url)
                        outer.workers.remove(url)
                self._answer({"status": "accepted"})

            def _answer(self, body):
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, url):
        self.workers.append(url)

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
