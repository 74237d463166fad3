"""Assertions about what comes back as output: how much of it, and what it could do to a reader."""

from __future__ import annotations

import ast
import json
import os
import site
import sys
import sysconfig
from pathlib import Path

from ..scene import Scene
from . import check

# Names that a guest may find in its environment without having been given them.
_PLAIN_NAMES = {
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "USER", "LOGNAME", "SHELL",
    "PWD", "OLDPWD", "SHLVL", "TERM", "HOSTNAME", "_", "container",
}  # fmt: skip
_PLAIN_PREFIXES = (
    "LC_", "PYTHON", "MPL", "OMP_", "OPENBLAS_", "BELLJAR_", "GIT_CONFIG_", "PIP_",
)  # fmt: skip
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@check("output_le")
def output_le(scene: Scene, _: str) -> str | None:
    result = scene.seen.result
    if result is None:
        return f"no result: {scene.seen.failure}"
    parts = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "error": result.error.message + result.error.traceback if result.error else "",
        "value": json.dumps(result.to_dict()["value"]),
    }
    for name, text in parts.items():
        size = len(text.encode("utf-8", "replace"))
        # A value is described by a few words where it was too large, so it may not pass the cap.
        if size > scene.cap:
            return f"{name} has {size} bytes, the cap is {scene.cap}"
    return None


@check("kept_le")
def kept_le(scene: Scene, _: str) -> str | None:
    """What the host holds in memory, which may be more than what it is as text."""
    result = scene.seen.result
    if result is None:
        return f"no result: {scene.seen.failure}"
    texts = (part for shown in result.displays for pair in shown.data.items() for part in pair)
    parts = {
        "the value": (_memory(result.value), 2 * scene.cap),
        "the displays": (sum(map(sys.getsizeof, texts)), 2 * scene.cap),
        "file names": (sum(len(os.fsencode(path)) for path in result.files), 1 << 20),
        "warnings": (sum(map(len, result.warnings)), 1 << 17),
    }
    for name, (size, most) in parts.items():
        if size > most:
            return f"{name} take {size} bytes, not at most {most}"
    return None


def _memory(value: object) -> int:
    """Bytes of a value with all that is in it; the same object counts once."""
    size, waiting, seen = 0, [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return size


@check("truncated_flag")
def truncated_flag(scene: Scene, _: str) -> str | None:
    result = scene.seen.result
    return None if result is not None and result.truncated else "`truncated` is not set"


@check("forged_only_in_stdout")
def forged_only_in_stdout(scene: Scene, _: str) -> str | None:
    if scene.seen.result is None:
        return f"no result: {scene.seen.failure}"
    told = json.loads(scene.seen.wire)
    told.pop("stdout")
    return "a forged frame reached the result" if "FORGED" in json.dumps(told) else None


@check("term_clean")
def term_clean(scene: Scene, _: str) -> str | None:
    shown = scene.subject.terminal(scene.job)
    if not shown.strip():
        return "the terminal showed nothing, so nothing was tested"
    text = shown.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    for character in text:
        code = ord(character)
        harmless = character in "\n\t" or code >= 0x20
        if not harmless or 0x7F <= code <= 0x9F or 0xDC80 <= code <= 0xDCFF or character in _BIDI:
            return f"U+{code:04X} reached the terminal"
    return None


@check("canary_content_absent")
def canary_content_absent(scene: Scene, _: str) -> str | None:
    # Some programs read only the first eight characters of it.
    stolen = scene.stage.canary_text[:8].encode()
    return "the canary's content came back" if stolen in scene.seen.everything else None


@check("secret_absent")
def secret_absent(scene: Scene, _: str) -> str | None:
    secret = scene.stage.world.secret.encode()
    return "the secret came back" if secret in scene.seen.everything else None


@check("env_allowlist_only")
def env_allowlist_only(scene: Scene, _: str) -> str | None:
    """The program prints the sorted names of its environment as a list."""
    stdout = scene.seen.result.stdout if scene.seen.result else ""
    lists = [line for line in stdout.splitlines() if line.startswith("[")]
    if not lists:
        return "the program did not list its environment"
    names = ast.literal_eval(lists[-1])
    strange = [n for n in names if n not in _PLAIN_NAMES and not n.startswith(_PLAIN_PREFIXES)]
    return f"the guest was given {', '.join(strange[:5])}" if strange else None


@check("no_host_paths_in_output")
def no_host_paths_in_output(scene: Scene, _: str) -> str | None:
    result = scene.seen.result
    if result is None:
        return f"no result: {scene.seen.failure}"
    told = result.stdout + result.stderr
    if result.error is not None:
        told += result.error.message + result.error.traceback
    for path in _host_paths(scene):
        if path in told:
            return f"the output names a path of the host: {path}"
    return None


def _host_paths(scene: Scene) -> set[str]:
    """Directories whose names only the host should know."""
    package = Path(__file__).parents[4]
    found = {
        str(scene.stage.world.root),
        str(package),
        os.path.expanduser("~"),
        site.getuserbase(),
        sysconfig.get_paths()["purelib"],
    }
    if sys.prefix != "/usr":
        found.add(sys.prefix)
    return {path for path in found if len(path) > 1}


@check("host_log_lacks_token")
def host_log_lacks_token(scene: Scene, _: str) -> str | None:
    token = scene.stage.token.encode()
    for name in ("/var/log/syslog", "/var/log/messages", "/var/log/user.log"):
        try:
            with open(name, "rb") as file:
                file.seek(max(0, os.path.getsize(name) - (1 << 20)))
                if token in file.read(1 << 20):
                    return f"the guest wrote to {name}"
        except OSError:  # no such log on this host, or not ours to read
            continue
    return None
