"""What single cases need around them before they mean anything, by case id."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from .scene import Scene
from .world import give_to, prints

Preparation = Callable[[Scene], AbstractContextManager[None]]
PREPARATIONS: dict[str, Preparation] = {}

# The tenant before: leaves itself wherever a pooled slot could keep it.
_RESIDUE = """
import builtins, mmap, os, sys, types
builtins.RESIDUE = 'TOKEN'
os.environ['RESIDUE'] = 'TOKEN'
sys.modules['residue_mod'] = types.ModuleType('residue_mod')
for path in ('/tmp/residue', '/dev/shm/residue'):
    try:
        with open(path, 'x') as file: file.write('TOKEN')
    except OSError: pass
pages = mmap.mmap(-1, 64 * 1048576)
pages[:] = b'TOKEN'.ljust(64, b'.') * 1048576
"""
_RESIDUE_FILES = ("/tmp/residue", "/dev/shm/residue")


def prepare(scene: Scene) -> AbstractContextManager[None]:
    """The case's own preparation, or one that does nothing."""
    return PREPARATIONS.get(scene.case.id, _nothing)(scene)


def preparation(*ids: str) -> Callable[[Preparation], Preparation]:
    def register(function: Preparation) -> Preparation:
        PREPARATIONS.update(dict.fromkeys(ids, function))
        return function

    return register


@contextmanager
def _nothing(scene: Scene) -> Iterator[None]:
    yield


@preparation("fs-020-host-tmp-visible")
@contextmanager
def plant_in_tmp(scene: Scene) -> Iterator[None]:
    """A file of the host in /tmp, to be listed by a guest that sees the host's /tmp."""
    planted = Path("/tmp") / f"belljar-selftest-{scene.stage.token}"
    planted.touch()
    try:
        yield
    finally:
        planted.unlink(missing_ok=True)


@preparation("se-010-pool-residue-reader")
@contextmanager
def another_tenant_before(scene: Scene) -> Iterator[None]:
    """Another tenant's program runs first, in whatever slot the case will get."""
    there = [path for path in _RESIDUE_FILES if os.path.exists(path)]
    if there:
        raise RuntimeError(f"{there[0]} exists on this host: the case would be about that file")
    scene.run(_RESIDUE.replace("TOKEN", scene.stage.token))
    try:
        yield
    finally:
        for path in _RESIDUE_FILES:
            if os.path.exists(path) and Path(path).read_text() == scene.stage.token:
                os.unlink(path)


@preparation("fs-012-protected-project-paths")
@contextmanager
def a_real_project(scene: Scene) -> Iterator[None]:
    """Some of the files exist already; fs-013 is about those that do not."""
    project = scene.stage.read_write
    for name in (".git/config", ".git/hooks/pre-commit", ".vscode/tasks.json", ".mcp.json"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# the user's own\n")
    if scene.stage.world.owner is not None:
        give_to(project, scene.stage.world.owner)
    scene.stage.read_write_print = prints(project)
    yield


@preparation("fs-026-git-new-names", "fs-027-git-new-submodule", "fs-028-git-bare-at-the-top")
@contextmanager
def an_empty_repository(scene: Scene) -> Iterator[None]:
    """As `git init` makes it."""
    git = scene.stage.read_write / ".git"
    for path in (git, git / "objects", git / "refs", git / "hooks"):
        path.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
    for path in (git, *git.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    if scene.stage.world.owner is not None:
        give_to(git, scene.stage.world.owner)
    scene.stage.read_write_print = prints(scene.stage.read_write)
    yield


@preparation("fs-029-socket-in-a-mount")
@contextmanager
def daemons_in_the_mounts(scene: Scene) -> Iterator[None]:
    """A daemon for all and one for the owner of its socket, in either mount."""
    with ExitStack() as listening:
        for top in (scene.stage.read_only, scene.stage.read_write):
            for name, mode in (("open.sock", 0o666), ("owner.sock", 0o600)):
                daemon = listening.enter_context(socket.socket(socket.AF_UNIX))
                daemon.bind(str(top / name))
                daemon.listen()
                os.chmod(top / name, mode)
                if scene.stage.world.owner is not None:
                    os.chown(top / name, scene.stage.world.owner, -1)
        yield


@preparation("pt-008-steal-stdin-next-cell")
@contextmanager
def queue_the_next_cell(scene: Scene) -> Iterator[None]:
    """The next program of the same tenant waits for its turn, with the token in code and input."""
    secret = f"NEXT-CELL-{scene.stage.token}"
    cell = replace(scene.job, code=f"import time; time.sleep(1) # {secret}", stdin=secret.encode())
    thread = threading.Thread(target=lambda: scene.subject.run(cell))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@preparation("pr-017-exec-storm")
@contextmanager
def program_under_every_name(scene: Scene) -> Iterator[None]:
    """The program execs itself by reading sys.argv[0], which is `-c` from the second time on."""
    scene.job = replace(scene.job, files={**scene.job.files, "-c": scene.job.code.encode()})
    yield


@preparation("rv-015-exception-object", "se-011-uninitialised-memory")
@contextmanager
def room_for_itself(scene: Scene) -> Iterator[None]:
    """The program copies 64 or 100 MiB on purpose: with less memory it would end too early."""
    scene.job = replace(scene.job, limits={**scene.job.limits, "MEM_MB": 512})
    with another_tenant_before(scene) if scene.case.group == "secrets" else _nothing(scene):
        yield


@preparation("rf-005-sparse-1TiB")
@contextmanager
def room_for_a_hole(scene: Scene) -> Iterator[None]:
    """A file of that size must exist, or the collector is not tested. It takes no room.

    These hold the disk limit by the size of each file, and firejail's disk is a part of memory.
    """
    if scene.klass in ("process", "landlock") or scene.subject.name == "firejail":
        room = {"DISK_MB": 2 << 20, "MEM_MB": 4 << 20}
        scene.job = replace(scene.job, limits={**scene.job.limits, **room})
    yield


@preparation("rf-013-image-bomb")
@contextmanager
def note_image_libraries(scene: Scene) -> Iterator[None]:
    from .checks.files import image_libraries

    scene.notes["image libraries"] = image_libraries()
    yield
