"""Lazy views in pytrees of torch, jax and optree, in functions of tvm-ffi, and as sequences."""

from __future__ import annotations

import collections
import dataclasses
import gc
import importlib
import types
import weakref
import zipfile

import pytest

import dlx
from dlx._views.pytree import structure_of

Pair = collections.namedtuple("Pair", ["first", "index"])


@dataclasses.dataclass
class Record:
    """A record with a field named like a view's method."""

    copy: object
    label: str


def tree(np):
    """Return a tree with every kind of container that has a view."""
    x = np.arange(3.0)
    return {"list": [x, 1], "tuple": (x + 1, "s"), "pair": Pair(x + 2, x + 3), "record": Record(x + 4, "r"), "x": x}


def of_torch():
    """Return (map, map of two, leaves, paths as text) of torch's pytrees."""
    module = pytest.importorskip("torch.utils._pytree")
    pytest.importorskip("torch")
    paths = lambda tree: [module.keystr(path) for path, _ in module.tree_flatten_with_path(tree)[0]]  # noqa: E731
    return module.tree_map, module.tree_map, module.tree_leaves, paths


def of_jax():
    """Return the same functions of jax."""
    module = pytest.importorskip("jax.tree_util")
    paths = lambda tree: [module.keystr(path) for path, _ in module.tree_flatten_with_path(tree)[0]]  # noqa: E731
    return module.tree_map, module.tree_map, module.tree_leaves, paths


def of_optree():
    """Return the same functions of optree."""
    optree = pytest.importorskip("optree")
    paths = lambda tree: [path.codify("") for path in optree.tree_accessors(tree)]  # noqa: E731
    return optree.tree_map, optree.tree_map, optree.tree_leaves, paths


LIBRARIES = pytest.mark.parametrize("library", [of_torch, of_jax, of_optree], ids=["torch", "jax", "optree"])


@LIBRARIES
def test_leaves_are_results(np, library):
    """The leaves are converted arrays and data; results are built-in containers or the source's types."""
    over, _, leaves, _ = library()
    view = dlx.convert(tree(np), to="dlx", lazy=True)
    arrays = [leaf for leaf in leaves(view) if isinstance(leaf, dlx.Tensor)]
    assert len(arrays) == 6 and len(leaves(view)) == 9 and view["x"] in arrays
    result = over(lambda leaf: np.asarray(leaf) * 2 if isinstance(leaf, dlx.Tensor) else leaf, view)
    assert type(result) is dict and list(result) == ["list", "tuple", "pair", "record", "x"]
    kinds = {key: type(value) for key, value in result.items()}
    assert kinds == {"list": list, "tuple": tuple, "pair": Pair, "record": Record, "x": np.ndarray}
    assert result["record"].copy.tolist() == [8, 10, 12] and result["record"].label == "r"
    assert result["pair"].index.tolist() == [6, 8, 10] and result["list"][0].tolist() == [0, 2, 4]


@LIBRARIES
def test_two_views_have_one_structure(np, library):
    """Views with the same type and keys can be mapped together; others cannot."""
    _, over, _, _ = library()
    one, two = (dlx.convert(tree(np), to="numpy", lazy=True) for _ in range(2))
    both = over(lambda a, b: np.add(a, b) if isinstance(a, np.ndarray) else a, one, two)
    assert both["tuple"][0].tolist() == [2, 4, 6]
    with pytest.raises((ValueError, AttributeError)):
        over(lambda a, b: a, one, dlx.convert({**tree(np), "list": [1]}, to="numpy", lazy=True))


@LIBRARIES
def test_paths_are_those_of_plain_containers(np, library):
    """The paths are the same as in the source."""
    _, _, _, paths = library()
    pair = Pair({"b": np.ones(1), "a": [np.ones(1), np.ones(1)]}, np.ones(1))
    assert sorted(paths(dlx.convert(pair, to="numpy", lazy=True))) == sorted(paths(pair))


@LIBRARIES
def test_slices_files_and_empty_views(np, library, tmp_path):
    """Every view class is a node: slices, open files, empty views."""
    over, _, leaves, _ = library()
    view = dlx.convert([np.ones(1) * i for i in range(4)], to="numpy", lazy=True)
    assert [leaf.item() for leaf in leaves(view[1:3])] == [1, 2]
    assert over(lambda x: x, dlx.convert([], to="numpy", lazy=True)) == []
    np.savez(tmp_path / "a.npz", x=np.arange(2), y=np.arange(3))
    with dlx.open(tmp_path / "a.npz", to="numpy") as file:
        assert {key: leaf.tolist() for key, leaf in over(lambda x: x, file).items()} == {"x": [0, 1], "y": [0, 1, 2]}


@pytest.mark.parametrize("module", ["torch.utils._pytree", "jax.tree_util", "optree"])
@pytest.mark.parametrize("first", [False, True], ids=["imported later", "imported first"])
@pytest.mark.slow
def test_when_the_library_is_imported_does_not_matter(np, python, module, first):
    """A view created before the import is a node, too; dlx does not import the library."""
    pytest.importorskip(module.partition(".")[0])
    importlib.import_module(module)
    name = "tree_leaves"
    out = python(
        f"""
        import sys, importlib.util
        if {first}: importlib.import_module({module!r})
        import numpy as np, dlx
        view = dlx.convert([np.ones(1), dict(a=np.zeros(2))], to="numpy", lazy=True)
        if not {first}: assert not [name for name in ("torch", "jax", "optree") if name in sys.modules]
        module = importlib.import_module({module!r})
        print([leaf.tolist() for leaf in module.{name}(view)], "exec_module" in vars(module.__loader__))
        print(importlib.util.find_spec("dlx_no_such_module"))
        """,
        imported=first and module.startswith("torch"),
    )
    assert out.splitlines() == ["[[1.0], [0.0, 0.0]] False", "None"]


def test_a_stand_in_is_left_alone(np, python):
    """Fake or failing modules of these names have no effect."""
    out = python(
        """
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch.utils._pytree"] = types.ModuleType("torch.utils._pytree")
        sys.modules["optree"] = None
        import numpy as np, dlx
        print(dlx.convert([np.ones(1)], to="numpy", lazy=True)[0])
        try: import optree
        except ImportError: print("none")
        """
    )
    assert out.splitlines() == ["[1.]", "none"]


def test_a_registry_that_refuses_is_told(np, python):
    """The view works, and a warning says that the library treats it as a leaf."""
    out = python(
        """
        import sys, types, warnings
        module = sys.modules["torch.utils._pytree"] = types.ModuleType("torch.utils._pytree")
        def register_pytree_node(cls, *arguments, **options): raise ValueError(f"no more room for {cls.__name__}")
        module.register_pytree_node = register_pytree_node
        module.MappingKey = module.GetAttrKey = module.SequenceKey = None
        sys.modules["torch"] = types.ModuleType("torch")
        import numpy as np, dlx
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print(dlx.convert([np.ones(1)], to="numpy", lazy=True)[0])
        print({str(each.message).partition(": ")[0] for each in said}, {each.category for each in said})
        """
    )
    said = "cannot register lazy views of dlx with torch.utils._pytree, which treats them as leaves"
    assert out.splitlines() == ["[1.]", f"{ {said} } {{<class 'RuntimeWarning'>}}"]


@pytest.mark.slow
def test_the_finder_goes(python):
    """After all three imports, `sys.meta_path` contains nothing of dlx."""
    for name in ("torch", "jax", "optree"):
        pytest.importorskip(name)
    out = python(
        """
        import sys, dlx._views.factory
        ours = lambda: [each for each in sys.meta_path if type(each).__module__.startswith("dlx")]
        assert len(ours()) == 1
        import torch.utils._pytree, jax.tree_util, optree
        print(ours())
        """,
        args=(),
    )
    assert out == "[]\n"


def test_tvm_ffi_functions_see_containers(np):
    """A function of tvm-ffi gets an Array or Map of the results, or the source if it is a tvm-ffi container."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    echo = tvm_ffi.get_global_func("testing.echo")
    view = dlx.convert([np.arange(3.0), [np.ones(2)]], to="tvm_ffi", lazy=True)
    array = echo(view)
    assert type(array) is tvm_ffi.Array and np.from_dlpack(array[0]).tolist() == [0, 1, 2]
    assert type(array[1]) is tvm_ffi.Array and len(array) == 2
    mapped = echo(dlx.convert({"a": np.ones(1)}, to="tvm_ffi", lazy=True))
    assert type(mapped) is tvm_ffi.Map and list(mapped) == ["a"]
    own = tvm_ffi.convert([tvm_ffi.from_dlpack(np.arange(2.0))])
    assert echo(dlx.convert(own, to="numpy", lazy=True)).same_as(own)


def test_what_takes_a_sequence_or_a_mapping(np, torch, tmp_path):
    """Other libraries accept `list(view)` and `dict(view)`."""
    safetensors = pytest.importorskip("safetensors.torch")
    view = dlx.convert({"a": np.ones((2, 3)), "b": np.zeros(2)}, to="torch", lazy=True)
    safetensors.save_file(dict(view), tmp_path / "x.safetensors")
    assert safetensors.load_file(tmp_path / "x.safetensors")["a"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.stack(list(dlx.convert([np.ones(2), np.zeros(2)], to="torch", lazy=True))).shape == (2, 2)


@LIBRARIES
def test_what_is_no_element_stays_and_is_compared(np, library):
    """Attributes of a record other than fields are copied, and are part of the structure."""
    over, _, _, _ = library()

    def view(scale, start=0.0):
        record = Record(np.arange(2.0) + start, "r")
        record.scale = scale
        return dlx.convert(record, to="numpy", lazy=True)

    assert over(lambda leaf: leaf, view(3.0)).scale == 3.0
    assert structure_of(view(2.0))[1] == structure_of(view(2.0, 5.0))[1]
    assert structure_of(view(2.0))[1] != structure_of(view(10.0))[1]
    assert structure_of(view(2.0))[1] != structure_of(dlx.convert(Record(1, 2), to="numpy", lazy=True))[1]


def test_a_structure_keeps_no_element(np):
    """Structures of traces are kept by jax; the source lives no longer than its view."""
    for make in (lambda x: Record(x, "r"), lambda x: Pair(1, x), lambda x: types.SimpleNamespace(x=x)):
        array = np.ones(2)
        element, source = weakref.ref(array), make(array)
        view = dlx.convert(source, to="numpy", lazy=True, copy=True)
        _, structure = structure_of(view)
        del view, source, array
        gc.collect()
        assert element() is None and type(structure.build([1] * len(structure.keys))) is structure.kind


def test_a_loader_for_several_modules_is_left_alone(python, tmp_path):
    """A loader of zipimport imports all modules of a file; another thread may import the same module."""
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as file:
        made = "from . import registry\nGetAttrEntry = AutoEntry = None\nnames = []\n"
        made += "def register_pytree_node(cls, *args, **keywords): names.append(cls.__name__)\n"
        file.writestr("optree/__init__.py", made)
        file.writestr("optree/registry.py", "__GLOBAL_NAMESPACE = 'x'\n")
        file.writestr("othermod.py", "x = 1\n")
    said = python(
        f"""
        import sys, importlib.util
        sys.path.insert(0, {str(tmp_path / "made.zip")!r})
        import dlx
        view = dlx.convert([b"abc"], to="dlx", lazy=True)
        importlib.util.find_spec("optree")
        import othermod
        from dlx._support import imports
        print(len(imports._waiting), "exec_module" in vars(othermod.__loader__))
        import optree
        print(type(optree.__loader__).__name__, type(optree.__spec__.loader).__name__, bool(optree.names))
        """
    )
    assert said.splitlines() == ["3 False", "zipimporter zipimporter True"]
