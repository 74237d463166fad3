"""Counting a process tree: who belongs to it, and what it uses, however it hides."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fresh
import pytest
import unprivileged

from belljar.linux import tree


def test_children_of_children_and_of_threads_are_descendants() -> None:
    code = """
import os, subprocess, sys, threading
from belljar.linux import tree

def answer():
    sleeper = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}])"
    made = []
    def start(program):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        made.append((process, int(process.stdout.readline())))
    threads = [threading.Thread(target=start, args=(middle,)), threading.Thread(target=start, args=(sleeper,))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    found = tree.descendants()
    wanted = {pid for _, pid in made} | {process.pid for process, _ in made}
    for pid in found: os.kill(pid, 9)
    for process, _ in made: process.wait()
    return sorted(wanted - set(found)), len(found), len(wanted)
"""  # noqa: E501
    missing, found, wanted = fresh.ask(code)
    assert missing == []
    assert found == wanted == 3


def test_a_process_that_closes_its_accounts_is_counted_by_its_resident_size() -> None:
    """PR_SET_DUMPABLE closes smaps to its own user; nobody must become weightless by that."""

    def weigh() -> tuple[int, bool]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
            data = bytearray(b"x") * (32 << 20)
            os.write(writer, data[:1])
            signal.pause()
        os.read(reader, 1)
        try:
            with open(f"/proc/{pid}/smaps_rollup"):
                closed = False
        except PermissionError:
            closed = True
        size = tree.proportional_size(pid)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return size, closed

    size, closed = unprivileged.call(weigh)
    assert closed  # the control arm: its accounts are closed to us
    assert size > 32 << 20


def test_sizes_and_times_of_a_process_that_is_gone_are_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert tree.proportional_size(process.pid) == 0
    assert tree.first_number(f"/proc/{process.pid}/statm", 1) == 0
    assert tree.cpu_seconds([process.pid]) == 0


def test_the_size_of_a_living_process_is_known() -> None:
    keep = bytearray(b"x") * (16 << 20)
    assert tree.proportional_size(os.getpid()) > len(keep)
    assert tree.cpu_seconds([os.getpid()]) > 0


def test_disk_use_counts_blocks_and_not_what_links_lead_to(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / "sub/file").write_bytes(b"x" * (1 << 20))
    (tmp_path / "outside").write_bytes(b"x" * (4 << 20))
    (work / "link").symlink_to(tmp_path / "outside")
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 40)
    used = tree.disk_use([str(work)], 1 << 40)
    assert 1 << 20 <= used < 2 << 20


def test_looking_at_the_disk_stops_when_it_knows_enough(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / str(number)).write_bytes(b"x" * (1 << 20))
    assert tree.disk_use([str(tmp_path)], 1 << 20) > 1 << 20


def test_more_files_than_can_be_counted_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert tree.disk_use([str(tmp_path)], 1 << 20) == 0  # empty files take no blocks
    monkeypatch.setattr(tree, "_MOST_ENTRIES", 10)
    assert tree.disk_use([str(tmp_path)], 1 << 20) > 1 << 20


@pytest.mark.timeout(60)
def test_files_that_come_and_go_do_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (1 << 20))
    stop, begun = threading.Event(), threading.Event()

    def flicker() -> None:
        while not stop.is_set():
            for number in range(50):
                (tmp_path / f"a{number}").touch()
            for number in range(50):
                (tmp_path / f"a{number}").unlink()
            begun.set()

    writer = threading.Thread(target=flicker)
    writer.start()
    try:
        assert begun.wait(30)
        assert all(tree.disk_use([str(tmp_path)], 1 << 40) >= 1 << 20 for _ in range(200))
    finally:
        stop.set()
        writer.join()


def test_a_directory_that_is_not_there_takes_no_room(tmp_path: Path) -> None:
    assert tree.disk_use([str(tmp_path / "never")], 1) == 0
