"""The command lines of the launchers: pure, and compared word for word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belljar.backends import bubblewrap, firejail, launched_plan, nsjail
from belljar.backends.launched_plan import Ends, Sandbox
from belljar.errors import BackendFailed
from belljar.interpreter import find as find_interpreter
from belljar.linux import root

PYTHON = find_interpreter(None).executable
ENDS = Ends(tell=3, frames=4, stdin=5, stdout=6, stderr=7)
SANDBOX = Sandbox(
    show=(
        ("/usr", "/usr", "ro", ()),
        ("/etc/ssl", "/etc/ssl", "ro", ()),
        (
            "/srv/project", "/sandbox/run/work/p", "rw",
            ((".git", "rw"), (".git/config", "ro"), ("keys", "hide"), ("token", "hide")),
        ),
    ),
    links=(("/bin", "usr/bin"), ("/tmp", root.TMP)),
    hide=("/usr/share/secret",),
    masks=("/proc/keys", "/proc/sys"),
    directories=("/proc/sys", "/srv/project/.git", "/srv/project/keys", "/usr/share/secret"),
    top=("bin", "etc", "home", "root", "srv", "usr", "run/docker.sock"),
    online=False,
    disk=1 << 20,
    inodes=4096,
    user=1000,
    maps_root=False,
)  # fmt: skip


def stage(directory: str) -> list[str]:
    parent, _, name = directory.rpartition("/")
    code = (
        f"import sys; sys.path.append({parent!r}); from {name}.stage import main; "
        "main(3, 4, 5, 6, 7)"
    )
    return [PYTHON, "-I", "-S", "-B", "-c", code]


def text(words: tuple[str, ...]) -> list[str]:
    """One option a line, as a person would write it down."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def test_bubblewrap() -> None:
    ends = replace(ENDS, filter=8, data=tuple(range(10, 10 + len(root.ETC))))
    words = bubblewrap.arguments("/usr/bin/bwrap", SANDBOX, ends, sized=True)
    assert list(words[-6:]) == stage(launched_plan.STAGE_DIR)
    assert text(words[:-6]) == [
        "/usr/bin/bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--unshare-user",
        "--uid 1000",
        "--gid 1000",
        "--unshare-net",
        "--hostname belljar",
        "--die-with-parent",
        "--as-pid-1",
        "--new-session",
        "--cap-drop ALL",
        "--clearenv",
        "--seccomp 8",
        "--symlink usr/bin /bin",
        "--symlink /sandbox/run/tmp /tmp",
        "--dev-bind /dev/null /dev/null",
        "--dev-bind /dev/zero /dev/zero",
        "--dev-bind /dev/full /dev/full",
        "--dev-bind /dev/random /dev/random",
        "--dev-bind /dev/urandom /dev/urandom",
        "--ro-bind-data 10 /etc/passwd",
        "--ro-bind-data 11 /etc/group",
        "--ro-bind-data 12 /etc/hosts",
        "--ro-bind-data 13 /etc/hostname",
        "--ro-bind-data 14 /etc/nsswitch.conf",
        "--dir /run",
        "--dir /var",
        "--dir /home",
        "--proc /proc",
        "--ro-bind /dev/null /proc/keys",
        "--tmpfs /proc/sys",
        "--remount-ro /proc/sys",
        "--size 1048576",
        "--tmpfs /sandbox/run",
        "--ro-bind /usr /usr",
        "--ro-bind /etc/ssl /etc/ssl",
        "--bind /srv/project /sandbox/run/work/p",
        "--bind /srv/project/.git /sandbox/run/work/p/.git",
        "--ro-bind /srv/project/.git/config /sandbox/run/work/p/.git/config",
        "--tmpfs /sandbox/run/work/p/keys",
        "--remount-ro /sandbox/run/work/p/keys",
        "--ro-bind /dev/null /sandbox/run/work/p/token",
        "--tmpfs /usr/share/secret",
        "--remount-ro /usr/share/secret",
        "--remount-ro /",
        "--chdir /",
        "--",
    ]


def test_a_set_uid_bubblewrap_gets_no_size_and_no_user_namespace() -> None:
    ends = replace(ENDS, data=tuple(range(10, 10 + len(root.ETC))))
    words = bubblewrap.arguments("/usr/bin/bwrap", replace(SANDBOX, user=None), ends, sized=False)
    assert not {"--size", "--unshare-user", "--uid", "--seccomp"} & set(words)


def test_firejail() -> None:
    words = firejail.arguments("/usr/bin/firejail", SANDBOX, replace(ENDS, data=(9,)))
    assert list(words[-6:]) == stage(launched_plan.LINUX_DIR)
    assert list(words[:-6]) == [
        "/usr/bin/firejail",
        "--quiet",
        "--profile=/proc/self/fd/9",
        "--deterministic-exit-code",
        "--deterministic-shutdown",
        "--ipc-namespace",
        "--hostname=belljar",
        "--machine-id",
        "--nonewprivs",
        "--nogroups",
        "--private-dev",
        "--private-tmp",
        "--keep-var-tmp",
        "--dbus-user=none",
        "--dbus-system=none",
        "--caps.drop=all",
        "--keep-fd=3,4,5,6,7",
        "--net=none",
        "--",
    ]


def test_firejail_keeps_one_capability_where_the_stage_maps_root() -> None:
    ends = replace(ENDS, data=(9,))
    words = firejail.arguments("/usr/bin/firejail", replace(SANDBOX, maps_root=True), ends)
    assert "--caps.keep=setfcap" in words
    assert "--caps.drop=all" not in words


def test_a_firejail_profile() -> None:
    show = tuple((source, source, mode, inside) for source, _, mode, inside in SANDBOX.show)
    assert firejail.profile(replace(SANDBOX, show=show)).splitlines() == [
        "read-only /usr",
        "whitelist /etc/ssl",
        "read-only /etc/ssl",
        "whitelist /srv/project",
        "read-write /srv/project",
        "read-only /srv/project/.git",
        "read-write /srv/project/.git",
        "read-only /srv/project/.git/config",
        "blacklist /srv/project/keys",
        "blacklist /srv/project/token",
        "blacklist /home",
        "blacklist /root",
        "blacklist /run/docker.sock",
        "blacklist /proc/keys",
        "blacklist /proc/sys",
        "blacklist /usr/share/secret",
    ]


def test_nsjail() -> None:
    words = nsjail.arguments("/usr/local/bin/nsjail", SANDBOX, ENDS)
    assert list(words[-6:]) == stage(launched_plan.STAGE_DIR)
    assert text(words[:-6]) == [
        "/usr/local/bin/nsjail",
        "--mode o",
        "--really_quiet",
        "--time_limit 0",
        "--disable_rlimits",
        "--nice_level 0",
        "--hostname belljar",
        "--cwd /",
        "--disable_proc",
        "--user 1000",
        "--group 1000",
        "--pass_fd 3",
        "--pass_fd 4",
        "--pass_fd 5",
        "--pass_fd 6",
        "--pass_fd 7",
        "--mount none:/proc:proc:subset=pid,hidepid=ptraceable",
        "--symlink usr/bin:/bin",
        "--symlink /sandbox/run/tmp:/tmp",
        "--bindmount /dev/null:/dev/null",
        "--bindmount /dev/zero:/dev/zero",
        "--bindmount /dev/full:/dev/full",
        "--bindmount /dev/random:/dev/random",
        "--bindmount /dev/urandom:/dev/urandom",
        "--mount none:/sandbox/run:tmpfs:size=1048576,nr_inodes=4096,mode=755",
        "--bindmount_ro /usr:/usr",
        "--bindmount_ro /etc/ssl:/etc/ssl",
        "--bindmount /srv/project:/sandbox/run/work/p",
        "--bindmount /srv/project/.git:/sandbox/run/work/p/.git",
        "--bindmount_ro /srv/project/.git/config:/sandbox/run/work/p/.git/config",
        "--mount none:/sandbox/run/work/p/keys:tmpfs:ro,size=4096,nr_inodes=1,mode=555",
        "--bindmount_ro /dev/null:/sandbox/run/work/p/token",
        "--mount none:/usr/share/secret:tmpfs:ro,size=4096,nr_inodes=1,mode=555",
        "--",
    ]


@pytest.mark.parametrize("tool", ["bubblewrap", "firejail", "nsjail"])
def test_the_network_is_shared_only_when_asked_for(tool: str) -> None:
    def words(online: bool) -> set[str]:
        sandbox = replace(SANDBOX, online=online)
        if tool == "bubblewrap":
            ends = replace(ENDS, data=tuple(range(10, 10 + len(root.ETC))))
            return set(bubblewrap.arguments("t", sandbox, ends, sized=True))
        if tool == "firejail":
            return set(firejail.arguments("t", sandbox, replace(ENDS, data=(9,))))
        return set(nsjail.arguments("t", sandbox, ENDS))

    closed, opened = words(False) - words(True), words(True) - words(False)
    assert (closed, opened) in [
        ({"--unshare-net"}, set()),
        ({"--net=none"}, set()),
        (set(), {"--disable_clone_newnet"}),
    ]


def test_what_is_not_there_is_not_mounted_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("project")
    (source / "keys").mkdir()
    (source / "token").touch()
    place = str(source)
    inside = (("keys", "hide"), ("token", "hide"), ("gone", "hide"), (".envrc", "ro"))
    sandbox = launched_plan.present(
        replace(SANDBOX, show=((place, place, "rw", inside),), masks=("/proc/no-such",))
    )
    assert sandbox.show == ((place, place, "rw", inside[:2]),)
    assert sandbox.masks == ()
    assert f"{place}/keys" in sandbox.directories
    assert f"{place}/token" not in sandbox.directories


def test_file_systems_below_a_read_only_directory_are_made_read_only_too() -> None:
    below = ("/srv/project/.git/config/x", "/srv/project/keys/x", "/usr/local/data", "/usrlocal")
    words = " ".join(nsjail.arguments("/usr/bin/nsjail", SANDBOX, ENDS, below))
    bound = [word for word in words.split(" --bindmount_ro ") if ":" in word]
    assert "/usr/local/data:/usr/local/data" in bound
    assert "/srv/project/.git/config/x:/sandbox/run/work/p/.git/config/x" in words
    assert "/srv/project/keys/x" not in words  # it is covered
    assert "/usrlocal" not in words
    with pytest.raises(BackendFailed, match="colon"):
        nsjail.arguments("/usr/bin/nsjail", SANDBOX, ENDS, ("/usr/a:b",))
