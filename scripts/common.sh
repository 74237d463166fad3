# Shared by the scripts beside it: find a Python, make the virtual environment, install packages.
set -eu
cd "$(dirname "$0")/.."

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else echo "needs root: $*" >&2; return 1
    fi
}

# apt_install PACKAGE... : installs those that are missing, on Debian and Ubuntu.
apt_install() {
    missing=""
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -z "$missing" ] && return 0
    command -v apt-get >/dev/null || { echo "install by hand:$missing" >&2; return 1; }
    echo "installing$missing"
    as_root apt-get update -qq
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# apt_install_asleep PACKAGE... : the same, and none of their services is started.
apt_install_asleep() {
    if [ -e /usr/sbin/policy-rc.d ] || ! command -v apt-get >/dev/null; then
        apt_install "$@"
        return
    fi
    status=0
    # What Debian's maintainer scripts ask before they start anything; 101 is "forbidden".
    printf '#!/bin/sh\nexit 101\n' | as_root tee /usr/sbin/policy-rc.d >/dev/null
    as_root chmod 755 /usr/sbin/policy-rc.d
    apt_install "$@" || status=$?
    as_root rm -f /usr/sbin/policy-rc.d
    return $status
}

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    echo "Belljar needs Python 3.11 or later" >&2
    return 1
}

# make_venv DIRECTORY : a virtual environment with a current pip.
make_venv() {
    python=$(find_python)
    if [ ! -x "$1/bin/pip" ]; then
        "$python" -c 'import venv, ensurepip' 2>/dev/null || apt_install python3-venv
        "$python" -m venv "$1"
    fi
}
