"""What the probe says of this host is what happens when it is tried."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import fresh

from belljar.linux import landlock, probe, seccomp

ASK = """
import json, threading
from belljar.linux import probe

def answer(threads):
    stop = threading.Event()
    if threads:
        threading.Thread(target=stop.wait).start()
    found = probe.facts()
    stop.set()
    return [found.userns, found.proc_mount, found.landlock_abi, found.seccomp,
            found.cgroup is not None, list(found.cpus)]
"""


def test_a_process_with_threads_finds_the_same_as_one_without() -> None:
    assert fresh.ask(ASK, False) == fresh.ask(ASK, True)


def test_threads_that_ask_at_the_same_time_get_one_answer() -> None:
    """Probing makes and removes a control group: two probes at once would disturb each other."""
    code = """
import threading
from belljar.linux import probe

def answer():
    ready, found = threading.Barrier(8), []
    def ask():
        ready.wait()
        found.append(probe.facts())
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(found), len({id(facts) for facts in found})
"""
    assert fresh.ask(code) == [8, 1]


def test_facts_are_asked_for_once() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(probe.facts).result() is probe.facts()


def test_the_probe_leaves_no_process_and_no_descriptor() -> None:
    code = """
import os
from belljar.linux import probe

def answer():
    before = len(os.listdir("/proc/self/fd"))
    probe.facts()
    after = len(os.listdir("/proc/self/fd"))
    try:
        os.waitpid(-1, os.WNOHANG)
        child = True
    except ChildProcessError:
        child = False
    return [after - before, child]
"""
    assert fresh.ask(code) == [0, False]


def test_facts_are_those_of_this_process() -> None:
    found = probe.facts()
    assert found.root == (os.geteuid() == 0)
    assert found.landlock_abi == landlock.abi()
    assert set(found.cpus) == os.sched_getaffinity(0)
    assert found.userns or found.userns_problem
    assert found.seccomp or found.seccomp_problem
    assert found.seccomp <= seccomp.supported()


def test_what_does_not_work_is_told_with_its_reason() -> None:
    code = """
import os
from belljar.linux import probe, seccomp, syscalls

def answer():
    syscalls.no_new_privileges()
    seccomp.install(seccomp.guest_filter((1, 2), closed=()))
    found = probe.facts()
    return [found.userns, found.userns_problem, found.proc_mount, found.seccomp]
"""
    userns, problem, proc, filters = fresh.ask(code)
    assert (userns, proc, filters) == (False, False, True)
    assert "unshare" in problem


def test_what_is_tried_ahead_is_the_answer_and_leaves_nobody() -> None:
    code = """
import os, sys
from belljar.linux import probe

def answer():
    probe.start_ahead()
    assert len(probe._ahead) == 1
    ahead = probe.facts()
    probe.let_go()
    probe.end_ahead()
    probe._probed.cache_clear()
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return not probe._ahead, ahead == probe.facts()
    return "somebody is left"
"""
    assert fresh.ask(code) == [True, True]


def test_what_nobody_asked_ends_too() -> None:
    code = """
import os
from belljar.linux import probe

def answer():
    before = os.listdir("/proc/self/fd")
    probe.start_ahead()
    probe.end_ahead()
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return os.listdir("/proc/self/fd") == before
"""
    assert fresh.ask(code) is True


def test_a_fork_of_the_host_asks_for_itself() -> None:
    code = """
import os
from belljar.linux import probe

def answer():
    probe.start_ahead()
    child = os.fork()
    if child == 0:
        found = probe.facts()
        probe.end_ahead()
        os._exit(0 if found.machine and len(probe._ahead) == 1 else 1)
    status = os.waitpid(child, 0)[1]
    probe.end_ahead()
    return status
"""
    assert fresh.ask(code) == 0


def test_nothing_is_tried_ahead_where_there_are_threads() -> None:
    code = """
import threading
from belljar.linux import probe

def answer():
    stop = threading.Event()
    threading.Thread(target=stop.wait).start()
    probe.start_ahead()
    stop.set()
    return len(probe._ahead)
"""
    assert fresh.ask(code) == 0


def test_holding_the_door_moves_nobody() -> None:
    code = """
import os
from belljar.linux import cgroup, probe

def answer():
    own = open("/proc/self/cgroup").read()
    door = cgroup.own_door()
    if door < 0:
        return True  # not ours to write
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, 0)
    probe._hold(door)
    return open("/proc/self/cgroup").read() == own
"""
    assert fresh.ask(code) is True
