"""Bearer tokens of the servers: created, listed, revoked and checked in one file.

The file holds a SHA-256 of each token, never a token. That is enough because a token is 256 random
bits: there is nothing to guess that a slow hash would slow down. Writers take a lock beside the
file and replace the file in one step, so a reader sees either all of a change or none of it. A
running server reads the file again when it has changed: a revoked token ends with the next request.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import BelljarError, ConfigError, RequestError
from ..records import plain, record

PREFIX = "bj_"
_MOST_BYTES = 4 << 20


class TokenUnknown(BelljarError):
    code = "token_unknown"


@record
class Token:
    """What is kept about one token. `id` names it in lists and logs; it is no secret."""

    id: str
    name: str
    sha256: str
    created: float

    def to_dict(self) -> dict[str, Any]:
        """What may be shown: all but the hash."""
        return {name: value for name, value in plain(self).items() if name != "sha256"}


def default_path(environ: Mapping[str, str] | None = None) -> str:
    """`$XDG_STATE_HOME/belljar/tokens.json`, or the same below `~/.local/state`."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is ignored
        home = environ.get("HOME") or environ.get("USERPROFILE")
        if not home:
            raise ConfigError(
                "tokens", "there is no HOME to keep them in", fix="give --tokens FILE"
            )
        base = os.path.join(home, ".local", "state")
    return os.path.join(base, "belljar", "tokens.json")


class Tokens:
    """The tokens of one file. Thread-safe, and safe beside other processes that change the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._known: tuple[Token, ...] = ()

    def create(self, name: str = "", *, only_first: bool = False) -> str | None:
        """A new token, which is kept nowhere. With `only_first`: None if the file has one."""
        if not name.isprintable() or len(name) > 100:
            raise RequestError("name", "is printable text of at most 100 characters")
        token = PREFIX + secrets.token_urlsafe(32)
        made = Token(
            id=secrets.token_hex(4), name=name, sha256=_digest(token), created=round(time.time(), 3)
        )
        with self._writing() as tokens:
            if only_first and tokens:
                return None
            tokens.append(made)
        return token

    def all(self) -> tuple[Token, ...]:
        """All tokens, oldest first. Raises ConfigError for a file that cannot be trusted."""
        with self._lock:
            try:
                status = os.stat(self.path)
            except FileNotFoundError:
                self._seen, self._known = None, ()
                return ()
            seen = (
                status.st_ino,
                status.st_mtime_ns,
                status.st_size,
                status.st_mode,
                status.st_uid,
            )
            if seen != self._seen:
                self._known = _read(self.path)
                self._seen = seen
            return self._known

    def revoke(self, which: str) -> Token:
        """End the token with this id, or with this name if only one has it."""
        with self._writing() as tokens:
            found = [token for token in tokens if which in (token.id, token.name)]
            if len(found) != 1:
                problem = "no token has" if not found else f"{len(found)} tokens have"
                raise TokenUnknown(
                    f"{problem} the id or name {which!r}", fix="`belljar token list` shows the ids"
                )
            tokens.remove(found[0])
        return found[0]

    def check(self, presented: str) -> Token | None:
        """The token that `presented` is, else None. Takes as long whatever is wrong about it."""
        digest = _digest(presented)
        found = None
        for token in self.all():
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    @contextlib.contextmanager
    def _writing(self) -> Iterator[list[Token]]:
        try:
            directory = os.path.dirname(os.path.abspath(self.path))
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with _locked(f"{self.path}.lock"):
                tokens = list(_read(self.path)) if os.path.lexists(self.path) else []
                before = list(tokens)
                yield tokens
                if tokens != before:
                    _write(self.path, tokens)
        except OSError as error:
            raise ConfigError(
                self.path, f"cannot be written: {error.strerror}", fix="give --tokens FILE"
            ) from None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: str) -> tuple[Token, ...]:
    # O_NONBLOCK: a named pipe must not hang us before the check below.
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ConfigError(path, f"cannot be read: {error.strerror}") from None
    try:
        _refuse_untrusted(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError
        table = json.loads(raw)
        if table["version"] != 1:
            raise ValueError
        return tuple(
            Token(
                id=str(entry["id"]),
                name=str(entry["name"]),
                sha256=str(entry["sha256"]),
                created=float(entry["created"]),
            )
            for entry in table["tokens"]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            path,
            "is not a file of tokens that this version of Belljar understands",
            fix="name another with --tokens FILE, or remove it and create new tokens",
        ) from None


def _refuse_untrusted(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(path, "is not a regular file")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            path,
            f"belongs to another user (uid {status.st_uid}), which could add tokens",
            fix=f"run `chown {os.geteuid()} {path}` if you trust its content",
        )
    if status.st_mode & 0o077:
        raise ConfigError(path, "others may read or write it", fix=f"run `chmod 600 {path}`")


def _write(path: str, tokens: list[Token]) -> None:
    text = json.dumps({"version": 1, "tokens": [plain(token) for token in tokens]}, indent=1)
    new = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """An exclusive lock between processes and threads, on a file of its own: the file of tokens is
    replaced, and a lock on what it was before would hold nothing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
