"""`belljar serve`: runs programs for HTTP clients that have a token."""

from __future__ import annotations

import argparse
import ipaddress
from typing import Any

from .. import config
from ..api import build_request
from ..config_keys import KEYS, REACH, RIGHTS, from_text
from ..engine import Engine
from ..errors import BelljarError, ConfigError
from ..explanation import limit_text, network_text
from ..policy_fields import number_text
from ..servers import logs, remote
from ..servers.auth import Tokens, default_path
from ..servers.http.options import DEFAULT_HOST, DEFAULT_PORT, Options
from ..stores.kernel_log import KernelLog
from ..units import seconds, size
from .arguments import UsageError, add_common, add_log
from .failures import print_json
from .terminal import complain, say, show

EPILOG = """\
Every call needs a token: `belljar token create` prints one. Without any token the server makes
one and prints it, once, on stdout. It listens on this machine only; to be reached from others,
--host must be joined by --expose, and a proxy with TLS belongs in front of it.

What remote callers may ask for is bounded by the [ceiling] of belljar.toml, and beyond that: no
network, no directories of this host, no images, unless an --allow-... says so.

examples:
  belljar serve
  curl -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json' \\
       -d '{"code": "6 * 7"}' http://127.0.0.1:8765/v1/run
  belljar serve --level strict --set ceiling.memory=512M --set ceiling.timeout=20s
  belljar serve --allow-network any --concurrency 8
  belljar serve --host 0.0.0.0 --expose --allow-host belljar.example

SIGTERM and Ctrl-C end the programs and then the server; a second one ends it at once.
The API is described at /docs and /openapi.json."""

_SHOWN = ("timeout", "memory", "cpus", "processes", "disk", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default=DEFAULT_HOST, help=f"default: {DEFAULT_HOST}")
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: any free one"
    )
    where.add_argument(
        "--expose", action="store_true", help="let --host be an address that others can reach"
    )
    where.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name of this server in Host headers, beside localhost and plain addresses",
    )
    where.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="pages of this origin may use the server, as https://tools.example",
    )
    where.add_argument("--tokens", metavar="FILE", help="the file of `belljar token --tokens`")

    may = parser.add_argument_group("what remote callers may ask for, below the ceiling")
    may.add_argument("--level", help="permissive, standard or strict; callers go no lower")
    may.add_argument(
        "--allow-network", choices=("off", "hosts", "any"), default="off", help="default: off"
    )
    may.add_argument(
        "--allow-mounts",
        choices=("none", "ro", "rw"),
        default="none",
        help="directories of this host; default: none",
    )
    may.add_argument(
        "--allow-host-files",
        action="store_true",
        help="run programs also where no backend hides this host's files from them",
    )
    may.add_argument("--allow-images", action="store_true", help="container images of their choice")
    may.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a key of belljar.toml, as ceiling.memory=1G; see `belljar settings`",
    )

    standard = Options()
    bounds = parser.add_argument_group("bounds of the server")
    bounds.add_argument(
        "--concurrency",
        type=int,
        default=standard.concurrency,
        metavar="N",
        help=f"runs at the same time (default: {standard.concurrency})",
    )
    bounds.add_argument(
        "--queue", type=int, default=standard.queue, metavar="N", help="runs that wait (256)"
    )
    bounds.add_argument(
        "--queue-time", default=standard.queue_time, metavar="TIME", help="how long at most (30s)"
    )
    bounds.add_argument(
        "--max-body", default=standard.max_body, metavar="SIZE", help="size of a request (32M)"
    )
    bounds.add_argument(
        "--body-time", default=standard.body_time, metavar="TIME", help="for a body to come (30s)"
    )
    bounds.add_argument(
        "--header-time", default=standard.header_time, metavar="TIME", help="for headers (10s)"
    )
    bounds.add_argument(
        "--connections", type=int, default=standard.connections, metavar="N", help="(1000)"
    )
    bounds.add_argument(
        "--keep-alive", default=standard.keep_alive, metavar="TIME", help="of silent streams (10s)"
    )
    add_log(parser, standard="stderr")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    try:
        from ..servers.http import app, listening
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "httptools"):
            raise
        raise UsageError(
            f"`belljar serve` needs packages that are not installed: {missing.name}",
            fix="pip install 'belljar[server]'",
        ) from None
    options = _options(args)
    local = _is_loopback(args.host)
    if not local and not args.expose:
        raise UsageError(
            f"{args.host!r} can be reached from other machines",
            fix="add --expose if that is meant, with a proxy that speaks TLS in front",
        )
    configured = config.load(path=args.config, overrides=_overrides(args))
    settings = remote.bounded(configured, options.rights)
    tokens = Tokens(args.tokens or default_path())
    tokens.all()  # a file that cannot be trusted is an error now, not with the first request
    logs.start(args.log, quiet=args.quiet)
    with listening.listen(args.host, args.port) as listener, Engine(settings) as engine:
        engine.sinks.add(KernelLog())
        made = tokens.create("made by belljar serve", only_first=True)
        asgi, runs = app.create_app(engine, tokens, options)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        offered = [] if args.json else _offered(engine, options.rights)

        def started() -> None:
            if args.json:
                print_json({"url": url, **({"token": made} if made else {})})
                return
            say(f"belljar serves {url} (docs: {url}/docs); Ctrl-C ends it")
            for line in offered:
                say(f"  {line}")
            if made:
                say("there was no token: this one was made, and is not shown again")
                show(f"token: {made}")

        if not local:
            complain(
                f"{args.host} can be reached from other machines, and tokens and programs travel"
                " unencrypted",
                "put a proxy that speaks TLS in front, and name it with --allow-host",
                colour="yellow",
            )
        listening.serve(asgi, runs, options, listener, started)
    return 0


def _options(args: argparse.Namespace) -> Options:
    for name in ("concurrency", "queue", "connections"):
        if not 1 <= getattr(args, name) <= 10_000:
            raise UsageError(f"--{name} is a number of 1 to 10000")
    return Options(
        rights=remote.Rights(
            network=args.allow_network,
            mounts=args.allow_mounts,
            images=args.allow_images,
            host_files=args.allow_host_files,
        ),
        allow_hosts=tuple(args.allow_host),
        allow_origins=tuple(args.allow_origin),
        concurrency=args.concurrency,
        queue=args.queue,
        queue_time=seconds("queue-time", args.queue_time),
        connections=args.connections,
        body_time=seconds("body-time", args.body_time),
        header_time=seconds("header-time", args.header_time),
        keep_alive=seconds("keep-alive", args.keep_alive),
        max_body=size("max-body", args.max_body),
    )


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"level": args.level}
    for pair in args.settings:
        key, equals, text = pair.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError(
                key or "--set",
                "is no setting",
                fix="`belljar settings` lists them: --set KEY=VALUE",
            )
        given[key] = from_text(key, text)
    return given


def _offered(engine: Engine, rights: remote.Rights) -> list[str]:
    """What a call gets that asks for nothing, and what it may ask for. Also asks the host about its
    backends, which would otherwise hold up the first call."""
    settings = engine.settings
    ceiling = settings.ceiling
    lines = []
    try:
        plan = engine.plan(build_request(code="", settings=settings))
        limits = ", ".join(f"{name} {limit_text(plan.policy, name)}" for name in _SHOWN)
        where = f"{plan.backend} (isolation {plan.isolation.value}, level {settings.level})"
        lines.append(f"Python runs on {where}: {limits}, network {network_text(plan.policy)}")
    except BelljarError as error:
        complain(f"no Python program can run here now: {error.message}", error.fix, colour="yellow")
    most = {name: getattr(ceiling, name) for name in _SHOWN}
    limits = ", ".join(
        f"{name} {number_text(name, value)}" for name, value in most.items() if value
    )
    network = min(ceiling.network, rights.network, key=REACH.index)
    mounts = min(ceiling.mounts, rights.mounts, key=RIGHTS.index)
    lines.append(f"callers may ask for at most: {limits}, network {network}, mounts {mounts}")
    return lines


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
