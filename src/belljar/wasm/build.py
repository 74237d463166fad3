"""Builds the guests that the package carries: a CPython started beforehand, and QuickJS.

Runs when the package is built (hatch_build.py) and for `belljar wasm build`. Nothing here imports
Belljar, so that it can be loaded from its file before there is a package.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable

COMPONENTIZE = "0.25.1"  # brings CPython 3.14
_HERE = os.path.dirname(os.path.abspath(__file__))
_GUESTS = os.path.join(_HERE, "guests")
PYTHON = os.path.join(_GUESTS, "python.wasm")
JAVASCRIPT = os.path.join(_GUESTS, "javascript.wasm")
GUESTS = {"python": PYTHON, "javascript": JAVASCRIPT}  # by language
# QuickJS-NG as WebAssembly, MIT; whatever registry it comes from, it is this very file.
_QUICKJS = "quickjs-wasi"
_QUICKJS_VERSION = "3.6.2"
_QUICKJS_SHA512 = (
    "FCqGtGOrMgzUiIrMNMA2YnsOxCNwo31dzqXvclXUC6xeT35NJLKXQJsvbeCTjvoFAwZgEAPg8U6+KAPDGXn8Mg=="
)
_SNAPSHOT_SOURCES = ("calls.py", "javascript.py", "prelude.js", "wizer.py")
# What becomes part of the component: (directory here, directory there).
_PARTS = (("../guest", "belljar/guest"), ("inside", "belljar/wasm/inside"))
_APP = "from belljar.wasm.inside.app import WitWorld\n__all__ = ['WitWorld']\n"
# In an interpreter of its own: it embeds an engine, and a failure in it may end the process.
_BUILD = "import sys, componentize_py; sys.argv[0] = 'componentize-py'; componentize_py.script()"

Say = Callable[[str], None]


class CannotBuild(Exception):
    """The guest cannot be built here; the message says why and what would help."""


def sources() -> dict[str, bytes]:
    """Every file of ours that goes into the component, by its path in there."""
    found = {}
    for here, there in _PARTS:
        directory = os.path.normpath(os.path.join(_HERE, here))
        for name in sorted(os.listdir(directory)):
            if name.endswith((".py", ".wit")):
                with open(os.path.join(directory, name), "rb") as file:
                    found[f"{there}/{name}"] = file.read()
    return found


def key() -> str:
    """What the present sources would make: equal keys, equal guests."""
    digest = hashlib.sha256(COMPONENTIZE.encode())
    for name, content in sources().items():
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def description(path: str) -> dict[str, str]:
    """What was noted about a guest when it was built; empty if there is none."""
    try:
        with open(path + ".json", encoding="utf-8") as file:
            noted: dict[str, str] = json.load(file)
        return noted if os.path.isfile(path) else {}
    except (OSError, ValueError):
        return {}


def is_current(path: str) -> bool:
    """Whether a guest is what its sources would make now."""
    return description(path).get("key") == KEYS[path]()


def build_python(say: Say) -> bool:
    """Make `python.wasm` unless it is there already; True if it was made. CannotBuild if not."""
    if is_current(PYTHON):
        return False
    with tempfile.TemporaryDirectory(prefix="belljar-wasm-build-") as scratch:
        tool = _componentize(scratch, say)
        stage = os.path.join(scratch, "stage")
        for name, content in {"app.py": _APP.encode(), **sources()}.items():
            path = os.path.join(stage, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        for package in ("belljar", "belljar/wasm"):
            open(os.path.join(stage, package, "__init__.py"), "w").close()
        say("building the Python guest for WebAssembly (10 to 20 seconds)")
        made = os.path.join(scratch, "python.wasm")
        wit = os.path.join(stage, "belljar/wasm/inside/program.wit")
        words = ["-d", wit, "-w", "program", "componentize", "-p", stage, "app", "-o", made]
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, *words],
            env={**os.environ, "PYTHONPATH": tool},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=scratch,
        )
        if done.returncode != 0 or not os.path.isfile(made):
            raise CannotBuild(f"componentize-py failed: {(done.stderr or done.stdout)[-2000:]}")
        keep(made, PYTHON, {"key": key(), "made_by": f"componentize-py {COMPONENTIZE}"})
    say(f"the Python guest is in {PYTHON}")
    return True


def keep(made: str, path: str, noted: dict[str, str]) -> None:
    """Put a finished guest into its place, all at once, with a note of what it is."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(made, "rb") as file:
        noted = {**noted, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    for name, content in (("", None), (".json", json.dumps(noted, sort_keys=True))):
        new = f"{path}{name}.{os.getpid()}.new"
        if content is None:
            shutil.copyfile(made, new)
        else:
            with open(new, "w", encoding="utf-8") as file:
                file.write(content + "\n")
        os.replace(new, path + name)


def _componentize(scratch: str, say: Say) -> str:
    """A directory from which componentize_py can be imported; fetched if it is not installed."""
    if _installed_version() == COMPONENTIZE:
        return ""
    target = os.path.join(scratch, "tool")
    say(f"fetching componentize-py {COMPONENTIZE}, which builds the guest")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--retries", "1", "--target", target,
            f"componentize-py=={COMPONENTIZE}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # In an isolated build this hides the installer from its own interpreter.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    if done.returncode != 0:
        raise CannotBuild(
            f"componentize-py {COMPONENTIZE} is not to be had: {done.stderr.strip()[-500:]}"
        )
    return target


def _installed_version() -> str:
    if importlib.util.find_spec("componentize_py") is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("componentize-py")
    except PackageNotFoundError:
        return ""


def build_javascript(say: Say) -> bool:
    """Fetch QuickJS unless it is there already; True if it was fetched. CannotBuild if not."""
    if is_current(JAVASCRIPT):
        return False
    say(f"fetching {_QUICKJS} {_QUICKJS_VERSION}, the JavaScript guest for WebAssembly")
    package = _fetch_quickjs()
    with tempfile.TemporaryDirectory(prefix="belljar-wasm-build-") as scratch:
        made = os.path.join(scratch, "javascript.wasm")
        os.makedirs(_GUESTS, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
            for name, path in (
                ("package/quickjs.wasm", made),
                ("package/LICENSE", os.path.join(_GUESTS, "javascript.LICENSE")),
            ):
                content = archive.extractfile(name)
                if content is None:
                    raise CannotBuild(f"{_QUICKJS} {_QUICKJS_VERSION} has no {name}")
                with open(path, "wb") as file:
                    shutil.copyfileobj(content, file)
        keep(made, JAVASCRIPT, {"key": quickjs_key(), "made_by": f"{_QUICKJS} {_QUICKJS_VERSION}"})
    say(f"the JavaScript guest is in {JAVASCRIPT}")
    return True


def _fetch_quickjs() -> bytes:
    registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
    url = f"{registry}/{_QUICKJS}/-/{_QUICKJS}-{_QUICKJS_VERSION}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            package: bytes = answer.read(16 << 20)
    except (OSError, ValueError) as error:
        raise CannotBuild(f"{url} is not to be had: {error}") from error
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != _QUICKJS_SHA512:
        raise CannotBuild(f"{url} is not the file that it should be")
    return package


def quickjs_key() -> str:
    return f"{_QUICKJS}-{_QUICKJS_VERSION}-{_QUICKJS_SHA512[:16]}"


def snapshot_key(path: str) -> str:
    """What else goes into a compiled guest, besides the guest itself."""
    if path != JAVASCRIPT:
        return ""
    digest = hashlib.sha256()
    for name in _SNAPSHOT_SOURCES:
        with open(os.path.join(_HERE, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:8]


GUEST_BUILDERS = (build_python, build_javascript)
KEYS = {PYTHON: key, JAVASCRIPT: quickjs_key}
