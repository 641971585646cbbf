#!/bin/sh
# Run the tests with Pythons of Debian's unstable suite, in a chroot, for Pythons that this machine lacks.
#
#     debian.sh FOLDER PYTHON...     as in: debian.sh ~/.cache/dlx/debian python3.14 python3.15
#
# FOLDER becomes a Debian with a C compiler and these Pythons (minutes, network, about 1 GB) and is kept for the next time.
# A clean copy of this checkout is built and tested there without torch; ARGS are pytest's arguments, like for `make test`.
# If this machine cannot run it, one sentence explains why, with status 0. Failing tests have another status.
set -eu
cd "$(dirname "$0")/../../.."
folder=$1
home=/srv # inside of it
shift

leave_out() {
    echo "note: $1; left out"
    exit 0
}

[ $# -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || leave_out "$* of Debian's unstable suite: a chroot needs root"
command -v debootstrap >/dev/null || leave_out "$* of Debian's unstable suite: debootstrap is not installed"
# Mounts made below are seen by this process alone, and end with it, however it ends.
if [ -z "${DLX_OWN_MOUNTS:-}" ]; then
    unshare --mount true 2>/dev/null || leave_out "$* of Debian's unstable suite: nothing can be mounted here"
    DLX_OWN_MOUNTS=1 exec unshare --mount tests/support/environments/debian.sh "$folder" "$@"
fi
unset DLX_OWN_MOUNTS

if [ ! -e "$folder" ]; then
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder.new"
    debootstrap --variant=minbase --include=ca-certificates,gcc,libc6-dev,make sid "$folder.new" >"$folder.log" 2>&1 ||
        leave_out "$* of Debian's unstable suite: debootstrap failed (is there a network?), see $folder.log"
    mv "$folder.new" "$folder"
fi

# Copy what a machine may need to reach its package indexes: names of hosts, certificates, pip's settings.
for path in /etc/resolv.conf /etc/hosts /etc/ssl/certs /etc/pip.conf /etc/xdg/pip "$HOME/.config/pip" "$HOME/.pip"; do
    [ -e "$path" ] || continue
    copy=$folder$(echo "$path" | sed "s,^$HOME/,$home/,")
    rm -rf "$copy"
    mkdir -p "$(dirname "$copy")"
    cp -rL "$path" "$copy"
done
for path in /proc /dev; do
    mount --rbind "$path" "$folder$path"
done
inside() {
    HOME=$home PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive chroot "$folder" "$@"
}

# A clean copy; environments of an earlier run stay.
checkout=$folder$home/dlx
mkdir -p "$checkout"
find "$checkout" -mindepth 1 -maxdepth 1 ! -name '.venv*' -exec rm -rf {} +
{ git ls-files --cached --others --exclude-standard -z 2>/dev/null || find . -type f ! -path './.venv*' -print0; } |
    tar --null --files-from=- --create | tar --extract --directory "$checkout" --no-same-owner

status=0
for python in "$@"; do
    if ! inside "$python" -c 'import ensurepip' 2>/dev/null; then
        # A mirror that has stood still for weeks is good enough; its signature is checked all the same.
        { inside apt-get -o Acquire::Check-Valid-Until=false update &&
            inside apt-get install --yes "$python-venv" "$python-dev"; } >>"$folder.log" 2>&1 || {
            echo "note: $python cannot be had from Debian's unstable suite, see $folder.log; left out"
            continue
        }
    fi
    echo "== $(inside "$python" --version) of Debian's unstable suite, without torch"
    inside make -C "$home/dlx" test SLOW=1 "PYTHON=$python" "VENV=.venv-${python#python}" TORCH= "ARGS=${ARGS:-}" || status=1
done
exit $status
