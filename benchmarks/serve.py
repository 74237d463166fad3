"""What `POST /v1/run` adds to the same run through the library: both in turn, on one machine.

    python benchmarks/serve.py [--rounds N] [--clients N]

The server is `belljar serve` in a process of its own, the client a plain socket that stays open, so
that the client's own work is as small as it can be. Read the difference of the medians and of the
least; on a busy machine the least is nearer to the truth. `--clients` adds a table of throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import belljar


class Connection:
    """One kept-alive connection, and one request on it at a time."""

    def __init__(self, port: int, token: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = (
            f"POST /v1/run HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )

    def run(self, code: str) -> bytes:
        body = json.dumps({"code": code}).encode()
        self._socket.sendall(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, answer = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(answer) < length:
            answer += self._receive()
        return answer

    def _receive(self) -> bytes:
        piece = self._socket.recv(65536)
        assert piece, "the server has closed the connection"
        return piece


def overhead(rounds: int, code: str, connection: Connection, runner: belljar.Runner) -> None:
    ways = {"library": lambda: runner.execute(code), "http": lambda: connection.run(code)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 5):
        for name, way in ways.items():
            time.sleep(0.004)  # until what the last run left is done
            start = time.perf_counter()
            way()
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(found) * 1e3 for name, found in seconds.items()}
    least = {name: min(found) * 1e3 for name, found in seconds.items()}
    paired = [h - s for h, s in zip(seconds["http"], seconds["library"], strict=True)]
    cells = [f"{middle[name]:.2f} / {least[name]:.2f} ms" for name in ways]
    added = f"{middle['http'] - middle['library']:.2f} / {least['http'] - least['library']:.2f} ms"
    each = f"{statistics.median(paired) * 1e3:.2f} ms"
    print(f"| `{code}` | {' | '.join(cells)} | {added} | {each} |", flush=True)


def throughput(clients: int, rounds: int, port: int, token: str, runner: belljar.Runner) -> None:
    def http() -> None:
        connection = Connection(port, token)
        for _ in range(rounds):
            connection.run("print(1)")

    def library() -> None:
        for _ in range(rounds):
            runner.execute("print(1)")

    rates = {}
    for name, body in (("library", library), ("http", http)):
        threads = [threading.Thread(target=body) for _ in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates[name] = clients * rounds / (time.perf_counter() - start)
    print(f"\n{clients} clients: library {rates['library']:.0f}/s, http {rates['http']:.0f}/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="The HTTP server against the library.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--clients", type=int, default=0, help="also measure so many at a time")
    parser.add_argument("--serve", default="", help="more words for `belljar serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen(
            [sys.executable, "-m", "belljar", "serve", "--port", "0", "--json", "--quiet",
             *args.serve.split()],
            stdout=subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": directory},
            text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            port = int(told["url"].rpartition(":")[2])
            connection = Connection(port, told["token"])
            print("| program | library median / least | http median / least | added | paired |")
            print("|---|---|---|---|---|")
            with belljar.create_runner() as runner:
                for code in ("print(1)", "sum(i * i for i in range(100_000))"):
                    overhead(args.rounds, code, connection, runner)
                if args.clients:
                    throughput(args.clients, args.rounds, port, told["token"], runner)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
