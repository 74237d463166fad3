"""Images as bytes: a tree becomes a layer, layers and a configuration become what engines load.

The format is the one of `docker save`, which Docker and Podman both load. Equal trees give equal
layers, whoever builds them and when.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from ..records import record
from .tree import Entry, Tree

_CHUNK = 1 << 20


@record
class PackedLayer:
    """A layer's tar file, open at its beginning, and what is known of it."""

    file: IO[bytes]
    size: int
    digest: str  # sha256 of the tar file, in hexadecimal


def hashes(tree: Tree) -> dict[str, str]:
    """The sha256 of every regular file, and the target of every link, by path."""
    told = {}
    for path in sorted(tree.entries):
        entry = tree.entries[path]
        if entry.target is not None:
            told[path] = f"link:{entry.target}"
        elif not entry.is_directory:
            told[path] = "sha256:" + hashlib.sha256(entry.content()).hexdigest()
    return told


def content_digest(hashed: Mapping[str, str]) -> str:
    """One hash over all paths and what lies there."""
    lines = "".join(f"{path}\0{told}\n" for path, told in sorted(hashed.items()))
    return "sha256:" + hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def pack(tree: Tree, file: IO[bytes]) -> PackedLayer:
    """Write `tree` as a tar archive to `file`, an empty file that can be read back."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(tree.entries):
            _add(archive, path, tree.entries[path])
    size = file.tell()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    return PackedLayer(file=file, size=size, digest=digest)


def _add(archive: tarfile.TarFile, path: str, entry: Entry) -> None:
    info = _header(path, entry.mode)
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    elif entry.is_directory:
        info.type = tarfile.DIRTYPE
    else:
        data = entry.content()
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
        return
    archive.addfile(info)


def _header(path: str, mode: int = 0o644, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode, info.size = mode, size
    info.uname = info.gname = "root"
    return info


def image_config(
    layers: Sequence[PackedLayer], *, architecture: str, created: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration of an image: whose environment, whose user, which layers."""
    return {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {
            "User": "1000:1000",
            "WorkingDir": "/workspace",
            "Env": [
                "PATH=/usr/local/bin:/usr/bin:/bin",
                "LANG=C.UTF-8",
                "PYTHONDONTWRITEBYTECODE=1",
            ],
            "Cmd": ["bash"],
            "Labels": dict(labels),
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        "history": [{"created": created, "created_by": "belljar images build"} for _ in layers],
    }


def docker_archive(
    name: str, config: Mapping[str, Any], layers: Sequence[PackedLayer]
) -> Iterator[bytes]:
    """The image `name` in the format of `docker save`, piece by piece, none kept in memory."""
    described = json.dumps(config, sort_keys=True).encode()
    config_name = hashlib.sha256(described).hexdigest() + ".json"
    manifest = [
        {
            "Config": config_name,
            "RepoTags": [name],
            "Layers": [f"{layer.digest}/layer.tar" for layer in layers],
        }
    ]
    yield from _member(config_name, described)
    yield from _member("manifest.json", json.dumps(manifest).encode())
    for layer in layers:
        yield _header(f"{layer.digest}/layer.tar", size=layer.size).tobuf(tarfile.USTAR_FORMAT)
        layer.file.seek(0)
        while chunk := layer.file.read(_CHUNK):
            yield chunk
        yield _padding(layer.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, data: bytes) -> Iterator[bytes]:
    header = _header(name, size=len(data))
    yield header.tobuf(tarfile.USTAR_FORMAT) + data + _padding(len(data))


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
