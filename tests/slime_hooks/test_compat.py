"""What newer SGLangs want of slime's engine actor, on a stand-in of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.slime_hooks import compat


class Answers(BaseHTTPRequestHandler):
    """As SGLang 0.5.23: /server_info keeps the label of the start, /model_info has the one of now."""

    def do_GET(self) -> None:
        body = json.dumps({"weight_version": "7" if self.path == "/model_info" else "default"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        return None


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(10)


def make_engine(port: int = 0) -> Any:
    class Engine:
        server_host, server_port = "127.0.0.1", port

        def __init__(self) -> None:
            self.calls: list[str] = []

        def _make_request(self, endpoint: str) -> None:
            self.calls.append(endpoint)

        def update_weights_from_distributed(self) -> None:
            self.calls.append("distributed")

        def update_weights_from_tensor(self) -> None:
            self.calls.append("tensor")

        def continue_generation(self) -> None:
            self.calls.append("continue")

    compat.open_weight_sessions(SimpleNamespace(SGLangEngine=Engine))
    return Engine()


def test_the_version_is_the_one_of_now(port: int) -> None:
    assert make_engine(port).get_weight_version() == "7"


def test_one_session_around_all_buckets_of_an_update() -> None:
    engine = make_engine()
    for _ in range(2):
        engine.update_weights_from_distributed()
    engine.update_weights_from_tensor()
    engine.continue_generation()
    engine.continue_generation()
    assert engine.calls == [
        *("begin_weight_update", "distributed", "distributed", "tensor", "end_weight_update"),
        *("continue", "continue"),
    ]
