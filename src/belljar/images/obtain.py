"""Gets an image that somebody asked for: from the engine, from its registry, or one of our own."""

from __future__ import annotations

from ..docker_api import Api
from ..errors import BackendUnavailable, BelljarError
from ..policy import Ceiling
from ..records import record
from . import build, names, store


@record
class Obtained:
    """`image` is None where only Belljar's own are to be had; `warning` then says why."""

    image: str | None
    warning: str = ""


def refuse_forbidden(image: str, ceiling: Ceiling) -> None:
    """BackendUnavailable for an image that the operator's `ceiling.images` does not list."""
    if not ceiling.allows_image(image):
        raise BackendUnavailable(
            f"image {image!r} is not in the operator's ceiling.images",
            fix="name an image from that list, or ask the operator to add this one",
        )


def obtain(
    api: Api, image: str, ceiling: Ceiling, say: store.Say, kind: str = "python"
) -> Obtained:
    """`image` if the engine has it or can pull it; else our own image of `kind`, built if missing.

    BackendUnavailable if none of these can be had, or the operator forbids `image`.
    """
    refuse_forbidden(image, ceiling)
    if store.exists(api, image):
        return Obtained(image=image)
    try:
        store.pull(api, image, say)
        return Obtained(image=image)
    except BelljarError as error:
        why = error.message
    own = names.image_name(kind)
    try:
        refuse_forbidden(own, ceiling)
        if not store.exists(api, own):
            for made in build.from_host(api, [kind], say):
                say(f"built {made.name}")
    except BelljarError as error:
        raise BackendUnavailable(
            f"image {image!r} could not be pulled ({why}), and {own} could not be built"
            f" ({error.message})",
            fix=f"belljar images pull {image}, or belljar images build {kind}",
        ) from error
    return Obtained(
        image=None,
        warning=f"image {image!r} could not be pulled ({why}): {own}, made from this host's files,"
        " is used instead",
    )
