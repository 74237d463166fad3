"""Building images: from this host's own files, or from the Dockerfiles that come with Belljar."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib import resources
from typing import Any

from .._version import __version__
from ..docker_api import Api
from ..errors import BackendUnavailable, RequestError
from . import archive, host, names, packages, store
from .store import Image, Say
from .tree import Tree

# The names that image formats have for machines.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PINNED = re.compile(r"^ARG (BASE|NODE)=(\S+)$", re.MULTILINE)


def from_host(api: Api, kinds: Iterable[str], say: Say) -> Iterator[Image]:
    """Make each of `kinds` from this host's files and put it into the engine.

    The base is made once. An image whose content is there already stays as it is.
    """
    if platform.system() != "Linux":
        raise BackendUnavailable(
            "images are made from the host's own files on Linux only",
            fix="belljar images build --from-dockerfile",
        )
    with ExitStack() as stack:

        def packed(tree: Tree) -> archive.PackedLayer:
            return archive.pack(tree, stack.enter_context(tempfile.TemporaryFile()))

        say("collecting Python, bash and the small commands of this host")
        base = host.base()
        base_packed = packed(base.tree)
        base_hashes = archive.hashes(base.tree)
        for kind in kinds:
            name = names.image_name(check(kind))
            versions, hashed, layers = dict(base.versions), dict(base_hashes), [base_packed]
            extra = _extra(kind, say)
            if extra is not None:
                added = extra.tree.without(base.tree)
                versions |= extra.versions
                hashed |= archive.hashes(added)
                layers.append(packed(added))
            record = _record(kind, source="host", base=_distribution(), versions=versions)
            record["content"] = archive.content_digest(hashed)
            labels = _labels(record)
            before = store.find(api, name)
            if before and before.content == record["content"] and before.version == __version__:
                say(f"{name} is there already, with the same content")
                yield before
                continue
            note = Tree()
            note.write(names.RECORD, _json({**record, "files": hashed}))
            layers.append(packed(note))
            config = archive.image_config(
                layers, architecture=_architecture(), created=_now(), labels=labels
            )
            say(f"giving {name} to the engine")
            store.load(api, archive.docker_archive(name, config, layers))
            yield _made(api, name, before)


def from_dockerfile(
    api: Api, kind: str, say: Say, *, bases: Mapping[str, str] | None = None, pull: bool = True
) -> Image:
    """Build `kind` from its Dockerfile. The images it starts from (`bases` replaces them: BASE,
    NODE) are pulled where the engine lacks them, and pinned by their digest."""
    name = names.image_name(check(kind))
    text = dockerfile(kind)
    pinned: dict[str, str] = {}
    for argument, tag in {**dict(_PINNED.findall(text)), **(bases or {})}.items():
        if not store.exists(api, tag):
            if not pull:
                raise names.missing(tag, "the container engine")
            store.pull(api, tag, say)
        pinned[argument] = _digest(api, tag)
    record = _record(kind, source="dockerfile", base=", ".join(pinned.values()), versions={})
    record["dockerfile"] = text
    before = store.find(api, name)
    query = {
        "t": name,
        "labels": json.dumps(_labels(record)),
        "buildargs": json.dumps(pinned),
        "networkmode": "default" if "pip install" in text else "none",
        "rm": "1",
        "forcerm": "1",
    }
    say(f"building {name}")
    context = _context({"Dockerfile": text.encode(), names.RECORD.split("/")[-1]: _json(record)})
    headers = {"Content-Type": "application/x-tar"}
    store.watch(api.stream("POST", "/build", query, context, headers, timeout=1800), say)
    return _made(api, name, before)


def dockerfile(kind: str) -> str:
    """The text of the Dockerfile for `kind`."""
    file = {"bash": "python"}.get(kind, kind) + ".Dockerfile"
    found = resources.files(__package__).joinpath("dockerfiles", file)
    return found.read_text(encoding="utf-8")


def check(kind: str) -> str:
    """`kind`, if it is one that we build."""
    if kind not in names.KINDS:
        known = ", ".join(names.KINDS)
        raise RequestError("image", f"{kind!r} is none that Belljar builds; known: {known}")
    return kind


def _extra(kind: str, say: Say) -> host.Layer | None:
    if kind == "node":
        say("collecting Node.js")
        return host.node()
    if kind == "data":
        say("collecting and compiling the Python packages of this environment")
        return packages.layer()
    return None


def _made(api: Api, name: str, before: Image | None) -> Image:
    store.forget_replaced(api, before, name)
    made = store.find(api, name)
    if made is None:
        raise names.missing(name, "after the build, the container engine")
    return made


def _record(kind: str, *, source: str, base: str, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": kind,
        "belljar": __version__,
        "source": source,
        "base": base,
        "architecture": _architecture(),
        "versions": dict(sorted(versions.items())),
    }


def _labels(record: Mapping[str, Any]) -> dict[str, str]:
    contents = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return {
        names.KIND_LABEL: record["image"],
        names.VERSION_LABEL: record["belljar"],
        names.SOURCE_LABEL: record["source"],
        names.BASE_LABEL: record["base"],
        names.CONTENT_LABEL: record.get("content", ""),
        names.CONTENTS_LABEL: contents,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _context(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as packed:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            packed.addfile(info, io.BytesIO(data))
    return made.getvalue()


def _digest(api: Api, tag: str) -> str:
    """`tag` by the digest it was pulled as; by its id where it never was in a registry."""
    told = api.json("GET", f"/images/{tag}/json")
    return str(next(iter(told.get("RepoDigests") or ()), told["Id"]))


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _now() -> str:
    """The time of the build; SOURCE_DATE_EPOCH fixes it for whoever compares builds."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(seconds) if seconds else None))
