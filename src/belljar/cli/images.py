"""`belljar images`: container images: list, build and remove Belljar's own, pull others."""

from __future__ import annotations

import argparse
import time

from .. import config
from ..docker_api import Api, connect
from ..images import names
from ..units import human_size
from . import summary, terminal
from .arguments import UsageError, add_common
from .failures import print_json

EPILOG = """\
examples:
  belljar images                             what the engine has of ours
  belljar images build                       the python image, from this host's own files
  belljar images build python node data      several; what they share is made once
  belljar images build --from-dockerfile     from a registry's base image instead
  belljar images remove python
  belljar images pull ruby:3.3               one of others, from its registry: a run never does that
  belljar images scan                        known holes in ours, by Trivy or Grype where installed
  belljar images scan ruby:3.3 --fail-on high

images:
""" + "\n".join(f"  {kind:<8} {purpose}" for kind, purpose in names.KINDS.items()) + """

Building from the host's files needs no registry and no network, takes seconds, and gives the same
bytes each time. What is in an image, with the hash of each file: /usr/share/belljar/image.json
inside it. The engine is the one of `docker_host` in belljar.toml or of DOCKER_HOST."""  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        metavar="list|build|remove|pull|scan",
        help="default: list",
    )
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help="python (default of build), node, bash or data"
    )
    parser.add_argument(
        "--from-dockerfile",
        action="store_true",
        help="build on a registry's image, pulled and pinned by its digest",
    )
    parser.add_argument(
        "--base", metavar="IMAGE", help="with --from-dockerfile: build on this image"
    )
    parser.add_argument(
        "--fail-on",
        metavar="SEVERITY",
        default="critical",
        help="with scan: exit code 1 for findings of this severity or above (default: critical)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    actions = {"list": _list, "build": _build, "remove": _remove, "pull": _pull, "scan": _scan}
    action = actions.get(args.action)
    if action is None:
        raise UsageError(f"there is no action {args.action!r}", fix=f"one of: {', '.join(actions)}")
    if args.base and not args.from_dockerfile:
        raise UsageError("--base is for --from-dockerfile", fix="add --from-dockerfile")
    if args.action != "build" and args.from_dockerfile:
        raise UsageError("--from-dockerfile is for `belljar images build`")
    return action(connect(config.load(path=args.config).docker_host), args)


def _list(api: Api, args: argparse.Namespace) -> int:
    from ..images import store

    if args.images:
        raise UsageError("`belljar images list` takes no names", fix="belljar images")
    found = store.images(api)
    if args.json:
        print_json({"images": [image.to_dict() for image in found], "engine": api.path})
        return 0
    if not found:
        terminal.show("no images of Belljar's own yet; to make one: belljar images build")
        return 0
    rows = [("image", "size", "made", "from", "with")]
    for image in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created))
        origin = f"{image.source}: {image.base}"
        rows.append((image.name, human_size(image.size), made, origin, image.contents))
    terminal.show(terminal.visible(summary.table(rows)))
    return 0


def _build(api: Api, args: argparse.Namespace) -> int:
    from ..images import build

    kinds = list(dict.fromkeys(build.check(kind) for kind in args.images or ["python"]))
    say = _silence if args.quiet else _progress
    if args.from_dockerfile:
        bases = {"BASE": args.base} if args.base else None
        made = [build.from_dockerfile(api, kind, say, bases=bases) for kind in kinds]
    else:
        made = list(build.from_host(api, kinds, say))
    if args.json:
        print_json({"images": [image.to_dict() for image in made], "engine": api.path})
    else:
        terminal.show("\n".join(f"{image.name}  {human_size(image.size)}" for image in made))
    return 0


def _remove(api: Api, args: argparse.Namespace) -> int:
    from ..images import store

    if not args.images:
        raise UsageError("name what to remove", fix="belljar images remove python, or a full name")
    known = {image.name for image in store.images(api)}
    wanted = [names.image_name(name) if name in names.KINDS else name for name in args.images]
    for name in wanted:
        # Only what we made: this is no way to lose somebody else's image.
        if name not in known:
            raise names.missing(name, f"of Belljar's own, the engine at {api.path}")
    for name in wanted:
        store.remove(api, name)
    if args.json:
        print_json({"removed": wanted, "engine": api.path})
    else:
        terminal.show("\n".join(f"removed {name}" for name in wanted))
    return 0


def _pull(api: Api, args: argparse.Namespace) -> int:
    from ..images import obtain, store

    if not args.images:
        raise UsageError("name what to pull", fix="belljar images pull ruby:3.3")
    for name in args.images:
        if name in names.KINDS or names.kind_of(name) is not None:
            raise UsageError(f"{name!r} is in no registry", fix="belljar images build")
    ceiling = config.load(path=args.config).ceiling
    for name in args.images:
        obtain.refuse_forbidden(name, ceiling)
    for name in args.images:
        store.pull(api, name, _silence if args.quiet else _progress)
    if args.json:
        print_json({"pulled": args.images, "engine": api.path})
    else:
        terminal.show("\n".join(f"pulled {name}" for name in args.images))
    return 0


def _scan(api: Api, args: argparse.Namespace) -> int:
    from ..images import scan, store

    if args.fail_on not in scan.SEVERITIES:
        known = ", ".join(scan.SEVERITIES)
        raise UsageError(f"--fail-on: {args.fail_on!r} is not one of {known}")
    scan.scanner()  # before anything is looked for
    wanted = args.images or [image.name for image in store.images(api)]
    wanted = [names.image_name(name) if name in names.KINDS else name for name in wanted]
    if not wanted:
        raise UsageError("there is no image to scan", fix="belljar images build, or name one")
    for name in wanted:
        if not store.exists(api, name):
            raise names.missing(name, f"the engine at {api.path}")
    found = []
    for name in wanted:
        if not args.quiet:
            _progress(f"scanning {name}")
        found.append(scan.scan(api, name))
    failed = [each for each in found if each.reaches(args.fail_on)]
    if args.json:
        print_json({"images": [each.to_dict() for each in found], "failed": len(failed)})
    else:
        rows = [("image", "digest", "scanner", "findings", "verdict")]
        for each in found:
            counts = ", ".join(f"{number} {word}" for word, number in each.counts.items())
            verdict = "failed" if each in failed else "passed"
            rows.append((each.image, each.digest[:19], each.scanner, counts or "none", verdict))
        terminal.show(terminal.visible(summary.table(rows)))
    return 1 if failed else 0


def _progress(line: str) -> None:
    terminal.say(terminal.visible(line))


def _silence(line: str) -> None:
    del line
