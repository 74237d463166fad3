"""Assertions about files: canaries, markers, mounts, and what the collector brought out."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from ..scene import Scene
from ..snapshot import Snapshot
from ..watch import core_pattern
from ..world import difference, prints
from . import check

_MEBI = 1 << 20
_COLLECTED_BYTES = 64 * _MEBI
_COLLECTED_FILES = 10_000
_COLLECT_SECONDS = 15.0
_CLEAN_SECONDS = 30.0
_IMAGE_LIBRARIES = ("PIL", "cv2", "imageio", "wand", "skimage")


@check("canary_intact")
def canary_intact(scene: Scene, _: str) -> str | None:
    return difference(scene.stage.canary_print, prints(scene.stage.canary_dir)) or None


@check("canary_dir_unchanged")
def canary_dir_unchanged(scene: Scene, _: str) -> str | None:
    return canary_intact(scene, "")


@check("ro_mount_unchanged")
def ro_mount_unchanged(scene: Scene, _: str) -> str | None:
    return difference(scene.stage.read_only_print, prints(scene.stage.read_only)) or None


@check("host_protected_paths_unchanged")
def host_protected_paths_unchanged(scene: Scene, _: str) -> str | None:
    """Everything that a tool would execute or obey in the project has a name with a dot."""
    before, after = scene.stage.read_write_print, prints(scene.stage.read_write)
    dotted = [{k: v for k, v in found.items() if k.startswith(".")} for found in (before, after)]
    for found in dotted:
        found.pop(".", None)  # the project itself
        for name in [name for name in found if ".set-aside-" in name]:
            del found[name]  # put out of every tool's sight after the run
    return difference(dotted[0], dotted[1]) or None


@check("host_git_executes_nothing")
def host_git_executes_nothing(scene: Scene, _: str) -> str | None:
    """The host looks at its project with git, with no configuration but what it finds there."""
    if shutil.which("git") is None:
        return "git is not installed on this host: what it would execute was not tested"
    env = {
        "PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }  # fmt: skip
    words = ("git", "-c", "safe.directory=*", "status")
    subprocess.run(words, cwd=scene.stage.read_write, env=env, capture_output=True, check=False)
    return marker_absent(scene, "")


@check("marker_absent")
def marker_absent(scene: Scene, _: str) -> str | None:
    return "the marker was made" if os.path.lexists(scene.stage.marker) else None


@check("runtime_binaries_unchanged")
def runtime_binaries_unchanged(scene: Scene, _: str) -> str | None:
    return None if scene.binaries_before == runtime_binaries() else "an interpreter file changed"


def runtime_binaries() -> dict[str, tuple[int, int, int, int]]:
    """Size, times and inode of the files that run us and our guests."""
    found = {}
    for path in {sys.executable, os.path.realpath(sys.executable), "/bin/sh", "/usr/bin/env"}:
        if os.path.exists(path):
            info = os.stat(path)
            found[path] = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_mode)
    return found


@check("no_setuid_on_host")
def no_setuid_on_host(scene: Scene, _: str) -> str | None:
    for path in scene.stage.root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            return f"{path.name} carries a setuid bit on the host"
    return None


@check("no_special_files_on_host")
def no_special_files_on_host(scene: Scene, _: str) -> str | None:
    for top in (scene.stage.root, scene.stage.world.temporary):
        for path in top.rglob("*"):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                return f"{path.name} is a special file"
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                return f"{path.name} carries a setuid bit on the host"
    return None


@check("no_core_files")
def no_core_files(scene: Scene, _: str) -> str | None:
    files = scene.seen.result.files if scene.seen.result else {}
    for name in files:
        if Path(name).name.split(".")[0] == "core":
            return f"the work directory holds {name}"
    places = {Path.cwd(), scene.stage.root, scene.stage.world.temporary}
    pattern = core_pattern()
    if pattern.startswith("/"):
        places.add(Path(pattern).parent)
    newest = time.time() - scene.seen.wall - 5
    for place in places:
        for path in place.glob("core*"):
            if path.is_file() and path.stat().st_mtime > newest:
                return f"a core file was written: {path.name}"
    return None


@check("heartbeat_stops_within_1s", urgent=True)
def heartbeat_stops_within_1s(scene: Scene, _: str) -> str | None:
    heartbeat = scene.stage.read_write / "heartbeat"

    def beats() -> int:
        return heartbeat.stat().st_size if heartbeat.exists() else 0

    time.sleep(1.0)
    after = beats()
    time.sleep(0.5)  # five beats of a survivor
    return None if beats() == after else "the daemon still writes"


# -- the collector -------------------------------------------------------------------------------


@check("symlinks_not_followed")
def symlinks_not_followed(scene: Scene, _: str) -> str | None:
    """The program leaves nothing in its output directory but links."""
    files = scene.seen.result.files if scene.seen.result else {}
    followed = [name for name, file in files.items() if name.startswith("out/") and file.data]
    return f"{followed[0]} was followed" if followed else None


@check("collected_size_le")
def collected_size_le(scene: Scene, _: str) -> str | None:
    files = scene.seen.result.files if scene.seen.result else {}
    total = sum(len(file.data or b"") for file in files.values())
    return None if total <= _COLLECTED_BYTES else f"{total} bytes were collected"


@check("collected_count_le")
def collected_count_le(scene: Scene, _: str) -> str | None:
    files = scene.seen.result.files if scene.seen.result else {}
    return None if len(files) <= _COLLECTED_FILES else f"{len(files)} files were collected"


@check("collected_modes_masked")
def collected_modes_masked(scene: Scene, _: str) -> str | None:
    files = scene.seen.result.files if scene.seen.result else {}
    special = [name for name, file in files.items() if getattr(file, "mode", 0) & 0o7000]
    return f"{special[0]} kept its special mode bits" if special else None


@check("collector_survives")
def collector_survives(scene: Scene, _: str) -> str | None:
    """A typed error is fine, a hang or an untyped one is not."""
    if scene.seen.result is None and scene.seen.failure.startswith("untyped"):
        return scene.seen.failure
    if scene.seen.result is None and scene.seen.stopped:
        return "the collector did not come back"
    return collect_time_le(scene, "")


@check("collect_time_le")
def collect_time_le(scene: Scene, _: str) -> str | None:
    return _time_beyond_the_run(scene, _COLLECT_SECONDS)


@check("cleanup_time_le")
def cleanup_time_le(scene: Scene, _: str) -> str | None:
    return _time_beyond_the_run(scene, _CLEAN_SECONDS)


def _time_beyond_the_run(scene: Scene, most: float) -> str | None:
    ran = scene.seen.result.usage.wall if scene.seen.result else 0.0
    beyond = scene.seen.wall - min(ran, scene.seen.wall)
    return None if beyond <= most else f"{beyond:.1f} s beyond the run itself"


@check("cleanup_complete")
def cleanup_complete(scene: Scene, _: str) -> str | None:
    left = [thing for thing in Snapshot.take().leftovers(scene.before) if "temporary" in thing]
    return left[0] if left else None


@check("names_escaped")
def names_escaped(scene: Scene, _: str) -> str | None:
    """Names are text for every reader: controls are escaped, and no lone surrogate is left."""
    if scene.seen.result is None:
        return f"no result: {scene.seen.failure}"
    if any(byte < 0x20 for byte in scene.seen.wire):
        return "a control character stands in the JSON"
    from .values import strict_json_problem

    return strict_json_problem(scene.seen.wire)


# -- the host does not open what a guest wrote ---------------------------------------------------


@check("collector_mem_le")
def collector_mem_le(scene: Scene, _: str) -> str | None:
    most = _COLLECTED_BYTES * 2 + 64 * _MEBI
    grown = scene.seen.host_growth
    return None if grown <= most else f"the host process grew by {grown // _MEBI} MiB"


@check("host_does_not_decompress")
def host_does_not_decompress(scene: Scene, _: str) -> str | None:
    files = scene.seen.result.files if scene.seen.result else {}
    given = ("out/.keep", "out/z.zip")
    strangers = [name for name in files if name.startswith("out/") and name not in given]
    if strangers:
        return f"{strangers[0]} was unpacked on the host"
    return collector_mem_le(scene, "")


@check("host_does_not_decode_images")
def host_does_not_decode_images(scene: Scene, _: str) -> str | None:
    new = image_libraries() - scene.notes.get("image libraries", image_libraries())
    return f"the host loaded {min(new)}" if new else collector_mem_le(scene, "")


def image_libraries() -> set[str]:
    """The image decoders that this process has loaded."""
    return {name for name in _IMAGE_LIBRARIES if name in sys.modules}
