"""Compiled Python for an image: a read-only root could never keep what an interpreter compiles.

The files are "unchecked hash" ones (PEP 552): the interpreter asks neither the clock nor the
source. What the compiler writes depends a little on what its process has seen before, so each batch
of files is compiled by a fresh interpreter in a fixed order: the same sources give the same bytes.
"""

from __future__ import annotations

import os
import posixpath
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

from ..errors import BackendFailed
from .tree import Tree

_BATCH = 250  # files per interpreter: part of the result, see above

# Reads "source\0path\0" pairs; answers each with the length of the compiled file, and the file.
# A file that this Python cannot compile (a template, another dialect) has the length zero.
_COMPILER = """
import importlib.util, marshal, struct, sys
UNCHECKED_HASH = (1).to_bytes(4, "little")
words = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\\0")[:-1]
for source, path in zip(words[::2], words[1::2]):
    with open(source, "rb") as file:
        text = file.read()
    try:
        code = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        done = b""
    else:
        head = importlib.util.MAGIC_NUMBER + UNCHECKED_HASH + importlib.util.source_hash(text)
        done = head + marshal.dumps(code)
    sys.stdout.buffer.write(struct.pack(">I", len(done)) + done)
"""


def add_bytecode(tree: Tree, python: str, cache_tag: str) -> None:
    """Compile every Python file of `tree` that has a source on this host, with `python`."""
    todo = [
        (entry.source, "/" + path)
        for path, entry in tree.files(suffix=".py")
        if entry.source is not None
    ]
    batches = [todo[start : start + _BATCH] for start in range(0, len(todo), _BATCH)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch, compiled in zip(
            batches, pool.map(lambda batch: _compile(python, batch), batches), strict=True
        ):
            for (_, path), data in zip(batch, compiled, strict=True):
                if data:
                    folder, file = posixpath.split(path)
                    name = f"{file.removesuffix('.py')}.{cache_tag}.pyc"
                    tree.write(f"{folder}/__pycache__/{name}", data)


def _compile(python: str, batch: list[tuple[str, str]]) -> list[bytes]:
    words = "".join(f"{source}\0{path}\0" for source, path in batch)
    done = subprocess.run(
        [python, "-s", "-S", "-B", "-W", "ignore", "-c", _COMPILER],
        input=words.encode("utf-8", "surrogateescape"),
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
        cwd="/",
        capture_output=True,
        timeout=600,
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-400:]
        raise BackendFailed(f"compiling the image's Python files failed: {said}")
    answer, results = done.stdout, []
    while answer:
        (length,) = struct.unpack_from(">I", answer)
        results.append(answer[4 : 4 + length])
        answer = answer[4 + length :]
    return results
