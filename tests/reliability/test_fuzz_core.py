"""The targets of `nox -s fuzz`, for a few seconds and with any compiler: the corpus, and seeded mutations of it."""

import os
import re
import subprocess

import pytest
from support.project import program
from support.stress.fuzz_core import CORE, CORE_FILES, CORPUS, SANITIZE, TARGETS, compile_into, link

import dlx
from dlx.errors import LayoutError

MUTATIONS, SEED = 50_000, 17
NAMES = {"layout", "make", "empty", "owners", "check", "copy", "repack", "arrow", "arrow_out"}

# A line of the core, and its broken version.
PLANTED = {
    "a product wraps": ("layout.c", "__builtin_mul_overflow(*size, t->shape[i], size)", "(*size *= t->shape[i], 0)"),
    "a sum wraps": ("layout.c", "return bits / 8 + (bits % 8 != 0);", "return (bits + 7) / 8;"),
    "a stride is too large": ("layout.c", "below = step = 1;", "step = 1;"),
    "an order is not seen": ("layout.c", "features |= DLX_LAYOUT_PERMUTED;", ";"),
    "extents are not multiplied": ("check.c", "|| product > most", ""),
    "a count is not taken": ("managed.c", "if (status == DLX_OK) dlx_managed_hold(made);", ";"),
    "an owner is forgotten": ("managed.c", "if (self->release) self->release(self->owner);", ";"),
    "an offset is added twice": ("managed.c", "t->byte_offset = 0;", ";"),
    "a tensor leaks": ("legacy.c", "dlx_managed_release(self->manager_ctx);", ";"),
    "an element is left out": ("copy.c", "j < inner->extent; j++, t +=", "j + 1 < inner->extent; j++, t +="),
    "columns are confused": ("copy.c", "_mm_unpackhi_epi64(low_ab, low_cd)", "_mm_unpackhi_epi64(low_cd, low_ab)"),
    "a bit is lost": ("repack.c", "if (shift + to.bits > 8)", "if (shift + to.bits > 9)"),
    "a child's offset is forgotten": ("arrow.c", "at->start = array->offset + from;", "at->start = from;"),
    "nulls are not counted": ("arrow.c", "return count - ones;", "return ones - ones;"),
    "bits of a byte are reversed": ("arrow.c", "from[k / 8] >> k % 8 & 1", "from[k / 8] >> (7 - k % 8) & 1"),
    "batches are not held": ("arrow.c", "if (status == DLX_OK) dlx_arrow_hold(data);", ";"),
    "a batch is kept by both": ("arrow.c", "add_batch(data);\n  array->release = NULL;", "add_batch(data);"),
}  # fmt: skip


def run(program):
    """Run the corpus and its mutations."""
    command = [str(program), str(CORPUS), str(MUTATIONS), str(SEED)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # of DLX_SANITIZE=1
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Return the targets and the core, compiled without sanitizers."""
    folder = tmp_path_factory.mktemp("objects")
    compile_into(folder, [TARGETS, *CORE_FILES], "-O1", "-DALONE")
    return folder


@pytest.mark.slow
def test_what_the_core_promises_holds(objects, tmp_path):
    """Each target runs without a difference to the references or a report of the sanitizers."""
    try:
        compile_into(tmp_path, CORE_FILES, "-O1", *SANITIZE)
        program = link(tmp_path / "fuzz_core", [objects / "fuzz_core.o", *tmp_path.glob("*.o")], *SANITIZE)
    except subprocess.CalledProcessError:  # no sanitizers
        program = link(tmp_path / "fuzz_core", objects.glob("*.o"))
    done = run(program)
    assert done.returncode == 0, done.stderr
    runs = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+) runs$", done.stderr, re.MULTILINE)}
    assert runs.keys() == NAMES and min(runs.values()) > 1000, runs


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.slow
def test_a_planted_fault_is_found(objects, tmp_path, fault):
    """Each planted fault is found."""
    name, right, wrong = PLANTED[fault]
    text = (CORE / name).read_text(encoding="utf-8")
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong), encoding="utf-8")
    compile_into(tmp_path, [tmp_path / name], "-O1", "-Wno-error", f"-I{CORE}")
    others = [path for path in objects.glob("*.o") if path.stem != name.removesuffix(".c")]
    done = run(link(tmp_path / "fuzz_core", [*others, *tmp_path.glob("*.o")]))
    assert done.returncode != 0 and re.search(r"^the input: \w+$", done.stderr, re.MULTILINE), done.stderr


def test_without_clang_fuzzing_says_so():
    """The message names the missing tool and how to install it."""
    command = program("stress.fuzz_core")
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is no clang here (Debian: apt install clang)" in done.stderr, done.stderr


def test_the_bytes_of_almost_2_to_the_63_bits():
    """Sizes near 2**63 bits are rounded up without an overflow."""
    assert dlx.from_pointer(4096, (2**63 - 1,), "uint1").nbytes == 2**60


def test_bits_before_address_0_are_refused():
    """Nine bits below address 1 need two bytes, and there is only one."""
    with pytest.raises(LayoutError):
        dlx.from_pointer(1, (10,), "uint1", strides=(-1,))


def test_strides_of_an_empty_tensor_fit_their_extents():
    """A program that calculates with these strides does not overflow."""
    tensor = dlx.from_pointer(0, (0, 2**62, 4), "int8")
    assert all(stride * extent < 2**63 for stride, extent in zip(tensor.strides, tensor.shape, strict=True))
