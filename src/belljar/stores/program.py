"""How records and logs name a program without repeating it."""

from __future__ import annotations

from ..types import Request


def sha256(request: Request) -> str:
    """The hash of the code, or of the command's words joined by blanks, in hexadecimal."""
    import hashlib

    program = request.code if request.code is not None else " ".join(request.command)
    return hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()
