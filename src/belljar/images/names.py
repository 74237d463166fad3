"""What Belljar's own images are called, and what to say when one is missing."""

from __future__ import annotations

from .._version import __version__
from ..errors import BackendUnavailable

# What `belljar images build` makes, and what each is for.
KINDS = {
    "python": "Python's standard library, bash and the usual small commands",
    "node": "python, and Node.js",
    "bash": "the same as python under the name of the language",
    "data": "python, and numpy, pandas, pyarrow and matplotlib as installed here",
}
REPOSITORY = "belljar"

# Labels on every image of ours, however it was made.
KIND_LABEL = "dev.belljar.image"
VERSION_LABEL = "dev.belljar.version"
SOURCE_LABEL = "dev.belljar.source"  # host | dockerfile
BASE_LABEL = "dev.belljar.base"  # what it was made from: a distribution, or an image's digest
CONTENT_LABEL = "dev.belljar.content"  # sha256 over every path and the hash of what is there
CONTENTS_LABEL = "dev.belljar.contents"  # "python 3.11.2, bash 5.2.15, ..."

# The provenance record inside each image.
RECORD = "/usr/share/belljar/image.json"

_KIND_OF_LANGUAGE = {"python": "python", "javascript": "node", "node": "node", "bash": "bash"}


def image_name(kind: str) -> str:
    """The full name of one of KINDS: `belljar/python:0.2.0`."""
    return f"{REPOSITORY}/{kind}:{__version__}"


def image_for(language: str) -> str:
    """The image that runs `language` unless the caller names another.

    A version is no part of its name: an image holds what the host had that made it. Whoever wants
    `python3.10` has to look inside, as the docker backend's agent does.
    """
    if language not in _KIND_OF_LANGUAGE:
        raise BackendUnavailable(
            f"no image of Belljar's own is known to run {language!r}",
            fix="name one that does: image=... in the call or in the language file",
        )
    return image_name(_KIND_OF_LANGUAGE[language])


def kind_of(image: str) -> str | None:
    """Which of KINDS `image` is the name of; None for other people's images."""
    return next((kind for kind in KINDS if image == image_name(kind)), None)


def missing(image: str, engine: str) -> BackendUnavailable:
    """The error for an image that `engine` (as in "the Docker Engine at ...") does not have."""
    kind = kind_of(image)
    if kind is not None:
        fix = f"belljar images build {kind}"
    else:
        fix = f"belljar images pull {image}, or name another image"
    return BackendUnavailable(f"{engine} has no image {image!r}", fix=fix)
