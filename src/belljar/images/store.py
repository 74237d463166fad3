"""Images in a container engine: put there, listed, pulled, removed, with progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from ..docker_api import Api, ApiError
from ..errors import BackendFailed
from ..records import plain, record
from . import names

Say = Callable[[str], None]


@record
class Image:
    """One image of ours, as the engine knows it."""

    name: str
    id: str
    kind: str
    size: int
    created: int  # seconds since the epoch
    source: str
    base: str
    contents: str
    content: str
    version: str

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


def images(api: Api) -> list[Image]:
    """Every image with our label, by name."""
    wanted = json.dumps({"label": [names.KIND_LABEL]})
    found = []
    for told in api.json("GET", "/images/json", {"filters": wanted}) or ():
        labels = told.get("Labels") or {}
        for name in told.get("RepoTags") or ["<none>"]:
            # Podman adds the registry that an image without one is not from.
            name = name.removeprefix("localhost/").removeprefix("docker.io/")
            found.append(
                Image(
                    name=name.replace("<none>:<none>", "<none>"),
                    id=told["Id"],
                    kind=labels.get(names.KIND_LABEL, ""),
                    size=told.get("Size", 0),
                    created=told.get("Created", 0),
                    source=labels.get(names.SOURCE_LABEL, ""),
                    base=labels.get(names.BASE_LABEL, ""),
                    contents=labels.get(names.CONTENTS_LABEL, ""),
                    content=labels.get(names.CONTENT_LABEL, ""),
                    version=labels.get(names.VERSION_LABEL, ""),
                )
            )
    return sorted(found, key=lambda image: (image.name, image.id))


def find(api: Api, name: str) -> Image | None:
    return next((image for image in images(api) if image.name == name), None)


def exists(api: Api, image: str) -> bool:
    """Whether the engine has `image`, whoever made it."""
    try:
        api.json("GET", f"/images/{image}/json")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


def load(api: Api, archive: Iterable[bytes]) -> None:
    """Give the engine an image in the format of `docker save`."""
    headers = {"Content-Type": "application/x-tar"}
    watch(api.stream("POST", "/images/load", {"quiet": "1"}, archive, headers), lambda line: None)


def pull(api: Api, image: str, say: Say) -> None:
    """Fetch `image` from its registry."""
    say(f"pulling {image}")
    # Without a tag or a digest the engine would fetch every tag there is.
    pinned = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"
    watch(api.stream("POST", "/images/create", {"fromImage": pinned}, b""), say)


def remove(api: Api, image: str) -> bool:
    """Remove `image` by name or id; False if there is none. A container that uses it keeps it:
    then this raises BackendFailed with the engine's reason."""
    try:
        api.json("DELETE", f"/images/{image}")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


def forget_replaced(api: Api, before: Image | None, name: str) -> None:
    """Remove the image that had `name` until just now, unless a container still needs it."""
    after = find(api, name)
    if before is None or after is None or before.id == after.id:
        return
    try:
        remove(api, before.id)
    except ApiError as error:
        if error.status != 409:
            raise


def watch(lines: Iterable[dict[str, Any]], say: Say) -> None:
    """Pass on what the engine reports, without the counting; BackendFailed if that is a failure."""
    for told in lines:
        if "error" in told:
            raise BackendFailed(f"the container engine failed: {told['error']}")
        text = str(told.get("stream") or told.get("status") or "").strip()
        if text and not told.get("progressDetail"):
            say(f"{told['id']}: {text}" if "id" in told else text)
