"""Rewards with a judge's score: by rules, and from a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("math_verify")

from verl_covgrpo.rewards.judge import JudgeError, rule_score, server_score


@pytest.mark.parametrize(
    ("response", "judge"),
    [
        ("First add them, then halve: \\boxed{4}", 10.0),
        ("\\boxed{4}", 9.0),
        ("First add them, then halve: \\boxed{5}", 4.0),
        ("so it is\nso it is\nso it is", 2.0),
        ("", 1.0),
        ("We add them up:\n" + "x" * 5000 + "\n\\boxed{4}", 9.0),
    ],
)
def test_by_rules(response: str, judge: float) -> None:
    found = rule_score("openai/gsm8k", response, "4")
    assert found == {"score": float("\\boxed{4}" in response), "judge": judge}


class Server:
    """An OpenAI-compatible server that says what it is told to."""

    def __init__(self) -> None:
        self.says, self.status = "8", 200
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append(json.loads(body))
                message = {"role": "assistant", "content": outer.says}
                answer = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "judge",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
                text = json.dumps(answer).encode()
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("openai")
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def ask(server: Server, response: str = r"\boxed{4}", **extra: Any) -> dict[str, float]:
    return server_score(
        "openai/gsm8k", response, "4", extra, url=server.url, model="referee", retries=0
    )


def test_a_server_is_asked(server: Server) -> None:
    assert ask(server, question="What is 2 + 2?") == {"score": 1.0, "judge": 8.0}
    (asked,) = server.asked
    assert (asked["model"], asked["temperature"]) == ("referee", 0.0)
    text = asked["messages"][0]["content"]
    for part in ("from 1", "What is 2 + 2?", "Reference answer:\n4", r"\boxed{4}"):
        assert part in text


@pytest.mark.parametrize(
    ("says", "judge"), [("10", 10), ("Rating: 7/10", 7), ("9.5", 9), (" 3\n", 3), ("**6**", 6)]
)
def test_the_number_is_found(says: str, judge: float, server: Server) -> None:
    server.says = says
    assert ask(server)["judge"] == judge


@pytest.mark.parametrize("says", ["", "good", "0", "11", "100"])
def test_no_number_from_1_to_10_is_an_error(says: str, server: Server) -> None:
    server.says = says
    with pytest.raises(JudgeError, match="gave no number from 1 to 10"):
        ask(server)


def test_a_server_that_fails_is_an_error(server: Server) -> None:
    server.status = 500
    with pytest.raises(JudgeError, match=r"referee at http://127\.0\.0\.1.* did not answer"):
        ask(server)
