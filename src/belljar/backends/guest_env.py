"""The environment that a guest starts with on this host, unless a request says otherwise."""

from __future__ import annotations

import os
import sys
from functools import cache

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What common tools keep below /etc, and stop or complain without: fontconfig, Java, ImageMagick,
# R, file, man, and terminals. Of Java's not `management`, which may hold passwords.
SETTINGS = (
    "fonts", *(f"java-{version}-openjdk/{part}" for version in (8, 11, 17, 21, 25) for part in (
        "images", "jvm-amd64.cfg", "jvm-arm64.cfg", "logging.properties", "net.properties",
        "security", "sound.properties", "swing.properties",
    )), "ImageMagick-6", "ImageMagick-7", "R", "magic", "magic.mime",
    "manpath.config", "perl", "papersize", "terminfo", "texmf",
)  # fmt: skip
_ZONES = "/usr/share/zoneinfo/"


def search_path(python: str = "") -> str:
    """PATH: `python`, `pip` and the like are those of the interpreter that runs programs."""
    return f"{os.path.dirname(python or sys.executable)}:{SYSTEM_PATH}"


def environment(*, home: str, tmp: str, python: str = "") -> dict[str, str]:
    """`home` is not the work directory, or caches would be among the files of a result."""
    return {
        "PATH": search_path(python),
        "HOME": home,
        "TMPDIR": tmp,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TZ": time_zone(),
        "USER": "user",
        "LOGNAME": "user",
        "PYTHONDONTWRITEBYTECODE": "1",
        # The host's own file may not be open to the guest, and is not its business.
        "GIT_CONFIG_NOSYSTEM": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@cache
def time_zone() -> str:
    """The name of this host's."""
    if os.environ.get("TZ"):
        return os.environ["TZ"]
    place = os.path.realpath("/etc/localtime")
    return place.removeprefix(_ZONES) if place.startswith(_ZONES) else "UTC"
