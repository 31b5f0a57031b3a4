"""An OpenAI-compatible server without a model, whose delays and faults its environment names. Run as `serving_fake.py PORT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOCK = threading.Lock()
SEEN: list[list[str]] = []
COUNTS = {"asked": 0, "drafted": 0, "accepted": 0}


def number(name: str, default: float = 0.0) -> float:
    return float(os.environ.get(name, default))


def shared_prefix(words: list[str]) -> int:
    """What a prefix cache would answer: the longest beginning that some prompt before had."""
    best = 0
    for other in SEEN:
        same = next(
            (at for at, (one, two) in enumerate(zip(words, other, strict=False)) if one != two), min(len(words), len(other))
        )
        best = max(best, same)
    return best


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else the first token waits for the acknowledgement of the headers.
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def reply(self, data: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": "fake"}]}).encode())
        if self.path == "/metrics" and "FAKE_ACCEPTANCE" in os.environ:
            lines = (
                f'vllm:spec_decode_num_{kind}_tokens_total{{engine="{engine}"}} {COUNTS[name] / 2}'
                for kind, name in (("draft", "drafted"), ("accepted", "accepted"))
                for engine in (0, 1)
            )
            return self.reply("\n".join(lines).encode(), kind="text/plain")
        return self.reply(b"no such page", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        words = prompt.split() if isinstance(prompt, str) else list(map(str, prompt))
        with LOCK:
            COUNTS["asked"] += 1
            cached = shared_prefix(words)
            SEEN.append(words)
            failing = COUNTS["asked"] > number("FAKE_FAIL_AFTER", 1e9)
        if failing:
            return self.reply(b'{"error": "out of memory"}', 500)
        length = len(words) * int(number("FAKE_TOKENS_A_WORD", 1)) + 1
        time.sleep(number("FAKE_PREFILL", 0.004))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        tokens = min(body["max_tokens"], int(number("FAKE_MOST_TOKENS", 1e9)))
        for index in range(tokens):
            if index:
                time.sleep(number("FAKE_STEP", 0.002))
            if index >= number("FAKE_BREAK_AT", 1e9):
                return None
            self.event({"choices": [{"text": " word", "finish_reason": "length" if index == tokens - 1 else None}]})
        with LOCK:
            COUNTS["drafted"] += 10
            COUNTS["accepted"] += int(10 * number("FAKE_ACCEPTANCE"))
        if "FAKE_NO_USAGE" not in os.environ:
            usage: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": tokens}
            usage["prompt_tokens_details"] = {"cached_tokens": int(number("FAKE_CACHED", cached))}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    print("loading the model", flush=True)
    if "FAKE_PIDS" in os.environ:
        # As deaf as a worker that hangs in a driver.
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        with Path(os.environ["FAKE_PIDS"]).open("a") as file:
            file.write(f"{os.getpid()} {child.pid} ")
    time.sleep(number("FAKE_START"))
    if "FAKE_DIE" in os.environ:
        print("CUDA out of memory", flush=True)
        sys.exit(7)
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
