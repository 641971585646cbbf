#!/bin/sh
# Build a free-threaded CPython from the source that Debian ships, once, and print the path of its interpreter.
#
#     free_threaded.sh FOLDER [KIND]     KIND: nogil (default), gil (the same source with its GIL), or tsan (ThreadSanitizer, clang);
#                                        nogil-optimized, gil-optimized: with --enable-optimizations, as packages are built
#
# FOLDER keeps the build (about ten minutes on two cores, 600 MB). If this machine cannot build it, one sentence on stderr
# explains why, with nothing on stdout and status 0.
set -eu
unset MAKEFLAGS MFLAGS MAKELEVEL  # of the make that calls this: CPython's own is another
folder=$1
kind=${2:-nogil}
python=$folder/$kind/bin/python3.14
log=$folder/$kind.log

leave_out() {
    echo "note: $1; left out" >&2
    exit 0
}

if [ ! -x "$python" ]; then
    options=--disable-gil
    install=
    around=
    case $kind in gil*) options= ;; esac
    case $kind in *-optimized) options="$options --enable-optimizations" ;; esac
    if [ "$kind" = tsan ]; then
        command -v clang >/dev/null || leave_out "ThreadSanitizer: clang is not installed"
        # Without pip, and without byte code of its library, which it would take half an hour to make.
        options="--disable-gil --with-thread-sanitizer --without-ensurepip --disable-test-modules"
        install="COMPILEALL_OPTS=--help"
        export CC=clang CXX=clang++ OPT="-DNDEBUG -g -O1"
        # An older ThreadSanitizer does not find its way among addresses that are too random.
        if setarch -R true 2>/dev/null; then around="setarch -R"; fi
    fi
    command -v apt-get >/dev/null || leave_out "a free-threaded Python: its source is had by apt, which is not here"
    mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -v security | sort -u | head -1)
    mkdir -p "$folder"
    source=
    for version in ${PYTHON_SOURCES:-3.14.8 3.14.7 3.14.6 3.14.5 3.14.4}; do
        name=python3.14_$version.orig.tar.xz
        if [ -s "$folder/$name" ] || curl -sfL -m 300 -o "$folder/$name" "$mirror/pool/main/p/python3.14/$name"; then
            source=$folder/$name
            break
        fi
    done
    [ -n "$source" ] || leave_out "a free-threaded Python: its source is not to be had here"
    echo "note: building $(basename "$source" .orig.tar.xz) ($kind) in $folder, ten minutes on two cores; see $log" >&2
    build=$folder/$kind.build
    rm -rf "$build" && mkdir -p "$build"
    tar xf "$source" -C "$build" --strip-components 1
    { cd "$build" && $around ./configure $options --prefix="$folder/$kind" && $around make -j2 &&
        $around make altinstall $install; } >"$log" 2>&1 ||
        leave_out "a free-threaded Python: its build failed, see $log"
    [ -x "$python" ] || ln -s "python3.14t" "$python"
    rm -rf "$build"
fi
echo "$python"
