"""`belljar token`: the bearer tokens of `belljar serve`."""

from __future__ import annotations

import argparse
import time

from ..servers.auth import Tokens, default_path
from . import summary
from .arguments import UsageError
from .failures import print_json
from .terminal import say, show, visible

EPILOG = """\
A program that sends `Authorization: Bearer TOKEN` may run code on `belljar serve`. A token is
printed once, when it is made; only its hash is kept, in $XDG_STATE_HOME/belljar/tokens.json (or
~/.local/state/...), or in the FILE of --tokens. A server sees changes at once.

examples:
  belljar token create --name laptop
  TOKEN=$(belljar token create --json | jq -r .token)
  belljar token list
  belljar token revoke laptop"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("create", "list", "revoke"), help="what to do")
    parser.add_argument("which", nargs="?", metavar="ID", help="revoke: a token's id or name")
    parser.add_argument("--name", default="", help="create: what the list calls it")
    parser.add_argument("--tokens", metavar="FILE", help="keep them in this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    tokens = Tokens(args.tokens or default_path())
    if (args.which is not None) != (args.action == "revoke"):
        raise UsageError(
            "revoke needs the id or name of a token; create and list take none",
            fix="belljar token revoke ID",
        )
    if args.action == "create":
        made = tokens.create(args.name)
        if args.json:
            print_json({"token": made})
        else:
            show(made or "")
            say(f"kept as a hash in {visible(tokens.path)}; the token is not shown again")
    elif args.action == "revoke":
        gone = tokens.revoke(args.which)
        if args.json:
            print_json({"revoked": gone.to_dict()})
        else:
            say(f"revoked {visible(gone.id)} {visible(gone.name)}".rstrip())
    elif args.json:
        print_json({"tokens": [token.to_dict() for token in tokens.all()]})
    else:
        rows = [("id", "created", "name")]
        for token in tokens.all():
            created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(token.created))
            rows.append((token.id, created, token.name))
        show(visible(summary.table(rows)))
    return 0
