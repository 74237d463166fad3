"""A process tree on Windows: one job object. UNTESTED on Windows.

The kernel keeps the account: every process that a member starts is a member, nobody leaves (the job
allows no breakaway), `TerminateJobObject` ends them all, and closing the job's last handle does the
same if we die. The first process starts suspended and is let go when it is in the job.

Nothing here has been run on Windows. On Linux the tests check what can be checked there: that the
module imports, the layout of the structures, the limits put into them, and the guest's boot code.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import RequestError
from ..guest import protocol
from .portable_tree import Launch, Load, Reaped

_CREATE_SUSPENDED = 0x4
_CREATE_NEW_PROCESS_GROUP = 0x200
_CREATE_NO_WINDOW = 0x08000000
_LIMIT_ACTIVE_PROCESS = 0x8
_LIMIT_AFFINITY = 0x10
_LIMIT_JOB_MEMORY = 0x200
_LIMIT_DIE_ON_UNHANDLED_EXCEPTION = 0x400
_LIMIT_KILL_ON_JOB_CLOSE = 0x2000
_CPU_RATE_ENABLE_HARD_CAP = 0x1 | 0x4
_ACCOUNTING, _EXTENDED_LIMITS, _CPU_RATE = 1, 9, 15  # JOBOBJECTINFOCLASS
_TICKS = 10_000_000  # of 100 ns in a second
_KILL_SECONDS = 5.0
# Where the guest puts its two pipes; fixed, because boot code names descriptors, not handles.
_GUEST_FDS = (10, 11)
_FROM_HOST = (
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "PROCESSOR_ARCHITECTURE",
)  # fmt: skip


class Accounting(ctypes.Structure):
    """JOBOBJECT_BASIC_ACCOUNTING_INFORMATION"""

    _fields_ = (
        ("user_time", ctypes.c_int64),
        ("kernel_time", ctypes.c_int64),
        ("period_user_time", ctypes.c_int64),
        ("period_kernel_time", ctypes.c_int64),
        ("page_faults", ctypes.c_uint32),
        ("total_processes", ctypes.c_uint32),
        ("active_processes", ctypes.c_uint32),
        ("terminated_processes", ctypes.c_uint32),
    )


class ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION, with the basic one and IO_COUNTERS spelled out."""

    _fields_ = (
        ("process_user_time", ctypes.c_int64),
        ("job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    )


class CpuRate(ctypes.Structure):
    """JOBOBJECT_CPU_RATE_CONTROL_INFORMATION; the rate is in 1/10000 of all cores."""

    _fields_ = (("flags", ctypes.c_uint32), ("rate", ctypes.c_uint32))


def job_limits(wanted: Mapping[str, float]) -> tuple[ExtendedLimits, CpuRate | None]:
    """The structures for `SetInformationJobObject`; the second one for a fraction of a core."""
    limits = ExtendedLimits()
    limits.flags = (
        _LIMIT_KILL_ON_JOB_CLOSE
        | _LIMIT_DIE_ON_UNHANDLED_EXCEPTION
        | _LIMIT_ACTIVE_PROCESS
        | _LIMIT_JOB_MEMORY
    )
    limits.active_processes = int(wanted["processes"])
    limits.job_memory = int(wanted["memory"])
    cpus, cores = wanted["cpus"], int(wanted["cores"])
    whole = math.ceil(cpus)
    if whole < cores <= 64:  # beyond that a mask names cores of one processor group only
        limits.flags |= _LIMIT_AFFINITY
        limits.affinity = (1 << whole) - 1
    if cpus < cores and (cpus != whole or cores > 64):
        return limits, CpuRate(_CPU_RATE_ENABLE_HARD_CAP, max(1, int(10_000 * cpus / cores)))
    return limits, None


class _Job:
    """A job object by its handle. Untested."""

    _api: Any
    _handle: int | None

    def __init__(self, wanted: Mapping[str, float]) -> None:
        if sys.platform != "win32":
            raise OSError("there are no job objects here")
        self._api = ctypes.WinDLL("kernel32", use_last_error=True)
        for name, *arguments in (
            ("CreateJobObjectW", ctypes.c_void_p, ctypes.c_wchar_p),
            ("AssignProcessToJobObject", ctypes.c_void_p, ctypes.c_void_p),
            ("TerminateJobObject", ctypes.c_void_p, ctypes.c_uint32),
            ("CloseHandle", ctypes.c_void_p),
            (
                "SetInformationJobObject",
                ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32,
            ),
            (
                "QueryInformationJobObject",
                ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p,
            ),
        ):  # fmt: skip
            getattr(self._api, name).argtypes = arguments
        self._api.CreateJobObjectW.restype = ctypes.c_void_p
        self._handle = self._api.CreateJobObjectW(None, None)
        if not self._handle:
            raise ctypes.WinError(ctypes.get_last_error())
        try:
            limits, rate = job_limits(wanted)
            self._set(_EXTENDED_LIMITS, limits)
            if rate is not None:
                self._set(_CPU_RATE, rate)
        except OSError:
            self.close()
            raise

    def add(self, process: int) -> None:
        self._check(self._api.AssignProcessToJobObject(self._handle, process))

    def terminate(self) -> None:
        self._check(self._api.TerminateJobObject(self._handle, 1))

    def accounting(self) -> Accounting:
        found: Accounting = self._get(_ACCOUNTING, Accounting())
        return found

    def peak_memory(self) -> int:
        return int(self._get(_EXTENDED_LIMITS, ExtendedLimits()).peak_job_memory)

    def close(self) -> None:
        if self._handle:
            self._api.CloseHandle(self._handle)
            self._handle = None

    def _set(self, kind: int, value: ctypes.Structure) -> None:
        size = ctypes.sizeof(value)
        self._check(
            self._api.SetInformationJobObject(self._handle, kind, ctypes.byref(value), size)
        )

    def _get(self, kind: int, value: Any) -> Any:
        size = ctypes.sizeof(value)
        self._check(
            self._api.QueryInformationJobObject(self._handle, kind, ctypes.byref(value), size, None)
        )
        return value

    def _check(self, succeeded: int) -> None:
        if sys.platform != "win32":
            raise OSError("there are no job objects here")
        if not succeeded:
            raise ctypes.WinError(ctypes.get_last_error())


class WindowsTree:
    """One run's processes: those in its job. Untested."""

    _job: _Job
    _process: subprocess.Popen[bytes]

    def __init__(self, launch: Launch) -> None:
        if sys.platform != "win32":
            raise OSError("there are no job objects here")
        import msvcrt

        handles = [msvcrt.get_osfhandle(fd) for fd in launch.frames]
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        self._job = _Job(dict(launch.job))
        try:
            self._process = subprocess.Popen(
                launch.argv,
                stdin=launch.stdin,
                stdout=launch.stdout,
                stderr=launch.stderr,
                env=dict(launch.env),
                cwd=launch.cwd,
                # Of all our handles the guest inherits these and its three streams.
                startupinfo=subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles}),
                creationflags=_CREATE_SUSPENDED | _CREATE_NEW_PROCESS_GROUP | _CREATE_NO_WINDOW,
            )
            try:
                started: Any = self._process  # the type stubs do not know its handle
                process = int(started._handle)
                self._job.add(process)
                resume = ctypes.WinDLL("ntdll").NtResumeProcess
                resume.argtypes = [ctypes.c_void_p]
                if status := resume(process):
                    raise OSError(f"NtResumeProcess: 0x{status & 0xFFFFFFFF:08x}")
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except OSError:
            self._job.close()
            raise

    def wait_for_end(self) -> None:
        self._process.wait()

    def look(self) -> Load:
        """Nothing to add up: the job holds memory, processes and CPU by itself."""
        return Load()

    def kill(self) -> int:
        """End the job; the number of processes that would not go."""
        self._job.terminate()
        deadline = time.monotonic() + _KILL_SECONDS
        while left := self._job.accounting().active_processes:
            if time.monotonic() > deadline:
                return int(left)
            time.sleep(0.005)
        return 0

    def reap(self) -> Reaped:
        code = self._process.wait()
        spent = self._job.accounting()
        return Reaped(
            wait_status=(code & 0xFFFFFFFF) << 8,
            cpu=(spent.user_time + spent.kernel_time) / _TICKS,
            peak_memory=self._job.peak_memory(),
        )

    def close(self) -> None:
        self._job.close()


def worker_code(read_fd: int, write_fd: int) -> str:
    """The program that takes the two inherited pipe handles and starts the worker on them."""
    if sys.platform != "win32":
        raise OSError("there are no handles here")
    import msvcrt

    return boot_code(msvcrt.get_osfhandle(read_fd), msvcrt.get_osfhandle(write_fd))


def boot_code(read_handle: int, write_handle: int) -> str:
    """`protocol.boot_code` behind a prefix that turns handles into the descriptors it names."""
    read_fd, write_fd = _GUEST_FDS
    take = "h=msvcrt.open_osfhandle({handle},{flags});os.dup2(h,{fd},False);os.close(h);"
    return (
        "import msvcrt,os;"
        + take.format(handle=read_handle, flags="os.O_RDONLY", fd=read_fd)
        + take.format(handle=write_handle, flags="0", fd=write_fd)
        # Before 3.12 Windows has no such call, and its pipes block anyway.
        + "os.set_blocking=getattr(os,'set_blocking',lambda fd,blocking:None);"
        + protocol.boot_code(protocol.GUEST_DIR, read_fd, write_fd)
    )


def environment(work: str, tmp: str) -> dict[str, str]:
    """What programs need to start at all, and directories of the run's own."""
    kept = {name: os.environ[name] for name in _FROM_HOST if name in os.environ}
    homes = dict.fromkeys(("USERPROFILE", "APPDATA", "LOCALAPPDATA"), work)
    return {**kept, **homes, "TEMP": tmp, "TMP": tmp}


def checked_names(names: Iterable[str]) -> None:
    """Refuse drive letters and alternate streams, which Windows reads from a colon."""
    for name in names:
        if ":" in name:
            raise RequestError("files", f"{name!r} contains a colon", fix="use another name")
