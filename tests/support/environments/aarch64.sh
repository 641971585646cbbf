#!/bin/sh
# Run tests on aarch64: under qemu's user emulation, in a Debian root file system, with the extensions that zig cross-compiled.
#
#     aarch64.sh FOLDER PYTHON [ARGUMENT...]     PYTHON has the group `wheels` of pyproject.toml; ARGUMENTs are pytest's
#
# TORCH=torch==2.10.0 adds jax and that torch, whose wheel in the index needs no CUDA, unlike those of 2.12 and later.
# FOLDER becomes a Debian with Python 3.11 (minutes, network, about 700 MB) and is kept for the next time. If this machine cannot
# run it, one sentence explains why, with status 0. Failing tests have another status.
set -eu
cd "$(dirname "$0")/../../.."
folder=$1
python=$2
shift 2
[ $# -gt 0 ] || set -- tests/core tests/protocols tests/engine tests/containers tests/frameworks/test_numpy_table.py \
    tests/views tests/sharing tests/files
arch=manylinux_2_17_aarch64
binfmt=/proc/sys/fs/binfmt_misc
site=/srv/site${TORCH:+-torch} # inside of the folder

leave_out() {
    echo "note: tests on aarch64: $1; left out"
    exit 0
}

[ "$(id -u)" = 0 ] || leave_out "a chroot needs root"
for program in debootstrap qemu-aarch64-static unzip; do
    command -v $program >/dev/null || leave_out "$program is not installed (Debian's packages debootstrap, qemu-user-static, unzip)"
done
# Mounts made below are seen by this process alone, and end with it, however it ends.
if [ -z "${DLX_OWN_MOUNTS:-}" ]; then
    unshare --mount true 2>/dev/null || leave_out "nothing can be mounted here"
    DLX_OWN_MOUNTS=1 exec unshare --mount tests/support/environments/aarch64.sh "$folder" "$python" "$@"
fi
unset DLX_OWN_MOUNTS

# Let the kernel run programs for aarch64 by qemu, also inside the root file system (F).
[ -e $binfmt/register ] || mount -t binfmt_misc binfmt_misc $binfmt 2>/dev/null || leave_out "there is no binfmt_misc"
if ! grep -qs "interpreter .*qemu-aarch64" $binfmt/*; then
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":dlx-aarch64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" >$binfmt/register
    trap 'echo -1 >$binfmt/dlx-aarch64' EXIT
fi

if [ ! -e "$folder" ]; then
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder.new"
    debootstrap --arch=arm64 --variant=minbase --include=gcc,libc6-dev,make,python3-dev,python3-venv bookworm "$folder.new" \
        >"$folder.log" 2>&1 || leave_out "debootstrap failed (is there a network?), see $folder.log"
    mv "$folder.new" "$folder"
fi
inside() {
    HOME=/srv PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 PYTHONPATH=$site:/srv/dlx chroot "$folder" "$@"
}
version=$(inside /usr/bin/python3 -c 'import sys; print("{}.{}".format(*sys.version_info))')
name=cp$(echo "$version" | tr -d .)

# Debian splits the headers: pyconfig.h depends on the processor.
headers=$folder/srv/headers/$name-$arch
mkdir -p "$headers" "$folder$site" "$folder/srv/dlx"
cp -r "$folder/usr/include/python$version/." "$headers/"
cp "$folder/usr/include/aarch64-linux-gnu/python$version/pyconfig.h" "$headers/"
rm -rf "$folder/srv/wheels"
TARGET_PYTHONS=$folder/srv/headers "$python" tests/support repository.wheels --out "$folder/srv/wheels" --only "$name-$arch"

# The tests' packages are downloaded here, since pip is slow under emulation.
sed '/^torch==/d' constraints.txt >"$folder/srv/constraints.txt"
download() {
    "$python" -m pip --disable-pip-version-check install --quiet --upgrade --target "$folder$site" --only-binary :all: \
        --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_28_aarch64 --python-version "$version" --implementation cp \
        --constraint "$folder/srv/constraints.txt" "$@"
}
download numpy ml_dtypes pytest pytest-timeout pytest-xdist hypothesis attrs pillow setuptools cffi pluggy rich
if [ -n "${TORCH:-}" ]; then
    # pip reads requirements for this machine's processor, where torch needs CUDA's libraries.
    download jax filelock typing-extensions sympy networkx jinja2 fsspec
    download --no-deps "$TORCH"
fi

# A clean copy of the checkout, with the extensions of the wheel as if they had been built there.
rm -rf "$folder/srv/dlx"
mkdir "$folder/srv/dlx"
{ git ls-files --cached --others --exclude-standard -z 2>/dev/null || find . -type f ! -path './.venv*' -print0; } |
    tar --null --files-from=- --create | tar --extract --directory "$folder/srv/dlx" --no-same-owner
unzip -qo "$folder"/srv/wheels/*.whl '*.so' -d "$folder/srv/dlx"

for path in /proc /dev; do
    mount --rbind "$path" "$folder$path"
done
echo "== Python $version of Debian on $(inside uname -m), under emulation"
inside sh -c 'cd /srv/dlx && exec python3 -m pytest -p no:cacheprovider --timeout 3000 "$@"' sh -m "not slow and not native" "$@"
