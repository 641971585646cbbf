"""Containers of frameworks: torch's records and parameters, numpy's files, TensorDict, BatchEncoding."""

from __future__ import annotations

import gc
import io
import types

import pytest

import dlx
from dlx import errors
from dlx._core import native

# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["max", "sort", "svd", "qr"])
def test_return_types_of_torch_are_kept(np, torch, call):
    """A torch.return_types value with other arrays keeps its type and fields."""
    make = {"svd": torch.svd, "qr": torch.linalg.qr}.get(call) or (lambda x: getattr(torch, call)(x, dim=1))
    source = make(torch.arange(9.0).reshape(3, 3) + torch.eye(3))
    result = dlx.convert({"r": source}, to="numpy")["r"]
    assert type(result) is type(source) and all(type(x) is np.ndarray for x in result)
    assert all(dlx.shares_memory(a, b) for a, b in zip(source, result, strict=True))
    back = dlx.convert(result, to="torch")
    assert type(back) is type(source) and torch.equal(back[0], source[0])


def test_a_packed_sequence_is_one_only_with_tensors(np, torch):
    """Inside torch it keeps its type and None fields; for other targets it becomes a dict."""
    source = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)], enforce_sorted=True)
    assert source.sorted_indices is None
    result = dlx.convert([source], to="torch", copy=True)[0]
    assert type(result) is type(source) and result.sorted_indices is None
    assert torch.equal(result.data, source.data) and not dlx.shares_memory(result.data, source.data)
    assert dlx.convert([source], to="torch")[0] is source
    fields = dlx.convert([source], to="numpy")[0]
    assert type(fields) is dict and list(fields) == ["data", "batch_sizes", "sorted_indices", "unsorted_indices"]
    assert type(fields["data"]) is np.ndarray and fields["sorted_indices"] is None
    with pytest.raises(errors.ConversionError) as caught:
        dlx.convert([source._replace(data=source.data.clone().requires_grad_())], to="numpy")
    assert caught.value.where == "obj[0].data"


def test_parameter_lists_and_dicts(np, torch):
    """They keep their type with parameters, and otherwise become lists and dicts."""
    parameters = [torch.nn.Parameter(torch.arange(2.0)), torch.nn.Parameter(torch.ones(3))]
    ring = torch.nn.ParameterList(parameters)
    named = torch.nn.ParameterDict([("w", parameters[0]), ("b", parameters[1])]).eval()
    kept = dlx.convert([ring, named], to="torch")
    assert type(kept[0]) is type(ring) and kept[0] is not ring and kept[0][0] is parameters[0]
    assert type(kept[1]) is type(named) and kept[1]["w"] is parameters[0] and not kept[1].training
    assert list(kept[1]) == ["w", "b"]
    plain = dlx.convert([ring, named], to="numpy", detach=True)
    assert type(plain[0]) is list and type(plain[1]) is dict and list(plain[1]) == ["w", "b"]
    assert type(plain[1]["w"]) is np.ndarray and plain[1]["w"] is plain[0][0]
    free = dlx.convert([ring, named], to="torch", detach=True)
    assert type(free[0]) is list and not free[0][0].requires_grad
    with pytest.raises(errors.ConversionError) as caught:
        dlx.convert({"p": named}, to="numpy")
    assert caught.value.where == "obj['p']['w']"
    assert ring[0] is parameters[0] and len(named) == 2


def test_the_state_of_a_module_is_a_tree(torch):
    """A state dict converts; the module is refused."""
    model = torch.nn.Linear(2, 2)
    state = dlx.convert(model.state_dict(), to="numpy")
    assert type(state) is type(model.state_dict()) and dlx.shares_memory(state["weight"], model.weight)
    assert state._metadata == model.state_dict()._metadata


def test_tensor_subclasses_and_sizes_in_a_tree(np, torch):
    """torch.Size is a tuple of numbers and passes through."""
    source = {"size": torch.Size([2, 3]), "dtype": torch.float32, "device": torch.device("cpu"), "x": torch.ones(1)}
    result = dlx.convert(source, to="numpy")
    assert all(result[key] is source[key] for key in ("size", "dtype", "device")) and type(result["x"]) is np.ndarray


# ---- numpy -----------------------------------------------------------------------------------------------------------


def test_an_open_npz_file_becomes_a_dict(np):
    """Each member is read once; the file stays open and unchanged."""
    file = io.BytesIO()
    np.savez(file, a=np.arange(3.0), b=np.ones((2, 2), "i4"))
    file.seek(0)
    with np.load(file) as npz:
        result = dlx.convert({"file": npz}, to="dlx")["file"]
        assert type(result) is dict and list(result) == ["a", "b"]
        assert np.asarray(result["a"]).tolist() == [0, 1, 2] and result["b"].shape == (2, 2)
        assert npz["a"].tolist() == [0, 1, 2]
        assert [leaf.path for leaf in dlx.plan(npz, to="dlx").leaves] == ["obj['a']", "obj['b']"]


def test_an_npz_file_that_cannot_be_read_is_an_error_with_a_path(np):
    """Object arrays are refused by numpy; the error has the file's path in the tree."""
    file = io.BytesIO()
    np.savez(file, a=np.array([object], dtype=object))
    file.seek(0)
    with np.load(file) as npz, pytest.raises(errors.ConversionError, match=r"at obj\['f'\]: .*be flattened") as caught:
        dlx.convert({"f": npz}, to="dlx")
    assert isinstance(caught.value.__cause__, ValueError)


def test_scalars_and_records_of_numpy_in_a_tree(np):
    """A scalar passes through; a structured array is refused with its path; a 0-d array converts."""
    result = dlx.convert([np.float32(2), np.array(3.0)], to="dlx")
    assert type(result[0]) is np.float32 and result[1].shape == ()
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert([np.zeros(2, "i4,f4")], to="dlx")
    assert caught.value.where == "obj[0]"


# ---- a container of a third party ------------------------------------------------------------------------------------


class Grid:
    """A container without an adapter at first."""

    def __init__(self, *cells):
        self.cells = cells


def test_an_adapter_may_declare_a_container(np, monkeypatch):
    """It also applies to subclasses, is looked up once per type, and precedes built-in bases."""
    from dlx._registry.registry import registry
    from dlx.adapter import Container

    module = types.ModuleType("grids_of_tests")
    module.Grid = Grid
    monkeypatch.setitem(__import__("sys").modules, "grids_of_tests", module)
    row = Container(
        types=("grids_of_tests.Grid",),
        flatten=lambda grid: (None, list(grid.cells)),
        unflatten=lambda grid, keys, children, blank: type(grid)(*children),
        holds="numpy",
        falls_to=list,
    )

    class Wide(Grid, list):
        pass

    adapter = registry.target("numpy").adapter
    assert dlx.convert([Grid(np.ones(1))], to="numpy", copy=True)[0].cells
    monkeypatch.setattr(type(adapter), "containers", (*adapter.containers, row))
    registry._forget()
    for kind in (Grid, Wide):
        array = np.ones(2)
        source = kind(array, 1)
        result = dlx.convert([source], to="numpy", copy=True)[0]
        assert type(result) is kind and result.cells[0] is not array and source.cells[0] is array
        assert type(dlx.convert([source], to="dlx")[0]) is list
    monkeypatch.undo()
    registry._forget()


def test_an_answer_that_was_overtaken_is_not_kept(monkeypatch):
    """A look-up during the load of an adapter is not cached."""
    from dlx._registry import lookup
    from dlx._registry.registry import registry

    class Thing:
        pass

    class Other:
        pass

    def overtaken(kind):
        monkeypatch.undo()
        registry._forget()  # as another thread does
        assert lookup.kind(Other).handler is None
        return lookup.Kind(None, lookup.LIST, "container")

    assert lookup.kind(Other).handler is None
    monkeypatch.setattr(lookup, "_classify", overtaken)
    assert lookup.kind(Thing).handler is lookup.LIST
    assert lookup.kind(Thing).handler is None


class Handle:
    """A wrapper that is new on each access, like elements of foreign containers."""

    def __init__(self, owner, np):
        self.owner, self.np = owner, np

    def __dlpack__(self, *, max_version=None):
        return dlx.convert(self.owner, to="dlx").__dlpack__(max_version=max_version)


def test_wrappers_of_the_same_thing_are_told_by_their_container(np, monkeypatch):
    """``same_as`` keeps identity across wrappers: one result per element."""
    from dlx._registry.registry import registry
    from dlx.adapter import Container

    class Foreign:
        def __init__(self, *owners):
            self.owners = owners

    module = types.ModuleType("foreign_of_tests")
    module.Foreign = Foreign
    monkeypatch.setitem(__import__("sys").modules, "foreign_of_tests", module)
    row = Container(
        types=("foreign_of_tests.Foreign",),
        flatten=lambda foreign: (None, [Handle(owner, np) for owner in foreign.owners]),
        elements="same_as",
        identity=lambda child: id(child.owner) if isinstance(child, Handle) else None,
        falls_to=list,
    )
    adapter = registry.target("numpy").adapter
    monkeypatch.setattr(type(adapter), "containers", (*adapter.containers, row))
    registry._forget()
    a, b = np.ones(2), np.ones(2)
    first, second = dlx.convert([Foreign(a, b, a), Foreign(b)], to="dlx")
    assert first[0] is first[2] and first[1] is second[0] and first[0] is not first[1]
    monkeypatch.undo()
    registry._forget()


# ---- packages that hold tensors; these tests run where they are installed --------------------------------------------


def test_a_tensordict_keeps_its_batch_size(np, torch):
    """A TensorDict iterates over batches; inside torch it stays a TensorDict, also nested."""
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"c": torch.zeros(2, 1)}, batch_size=[2, 1])
    source = tensordict.TensorDict({"a": torch.arange(2.0), "b": inner}, batch_size=[2], names=["time"])
    source.lock_()
    result = dlx.convert([source], to="torch", copy=True)[0]
    assert type(result) is type(source) and result is not source
    assert result.batch_size == source.batch_size and result.names == ["time"] and result.is_locked
    assert result["b"].batch_size == inner.batch_size
    assert torch.equal(result["a"], source["a"]) and not dlx.shares_memory(result["a"], source["a"])
    same = dlx.convert([source], to="torch")[0]
    assert type(same) is type(source) and same["a"] is source["a"]
    plain = dlx.convert([source], to="numpy")[0]
    assert type(plain) is dict and list(plain) == ["a", "b"] and type(plain["b"]) is dict
    assert dlx.shares_memory(plain["a"], source["a"])
    assert [leaf.path for leaf in dlx.plan(source, to="numpy").leaves] == ["obj['a']", "obj['b']['c']"]


def test_a_tensordict_keeps_what_is_no_tensor(np, torch):
    """Text and objects stay, arrays inside them are converted; a lazy view writes tensors back."""
    tensordict = pytest.importorskip("tensordict")
    things = tensordict.NonTensorData({"k": np.ones(2)}, batch_size=[2])
    source = tensordict.TensorDict({"a": torch.ones(2), "text": "t", "things": things}, batch_size=[2])
    result = dlx.convert(source, to="torch", copy=True)
    assert type(result) is type(source) and result["text"] == "t" and result.batch_size == source.batch_size
    assert type(result["things"]["k"]) is torch.Tensor and type(source["things"]["k"]) is np.ndarray
    plain = dlx.convert(source, to="numpy")
    assert plain["text"] == "t" and plain["things"]["k"] is source["things"]["k"]
    view = dlx.convert(source, to="numpy", lazy=True)
    assert view["a"] is view["a"] and list(view) == ["a", "text", "things"] and len(view) == 3
    view["a"] = np.zeros(2, "f4")
    assert type(source["a"]) is torch.Tensor and source["a"].tolist() == [0, 0]


def test_a_tensorclass_is_refused_with_a_fix(torch):
    """It is array-like, or its fields are not its own attributes and a copy would share them."""
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Pair:
        x: torch.Tensor

    pair = Pair(x=torch.ones(2), batch_size=[2])
    before = pair.x
    for target in ("numpy", "torch"):
        with pytest.raises(errors.DlxError, match=r"at obj\[0\]: .*(to_dict|one by one)"):
            dlx.convert([pair], to=target)
    assert pair.x is before


def test_a_batch_encoding_keeps_its_encodings(np, torch):
    """Encodings and sequence counts of this UserDict are kept, and the source is unchanged."""
    tokenization = pytest.importorskip("transformers.tokenization_utils_base")
    source = tokenization.BatchEncoding(
        {"input_ids": torch.arange(6).reshape(2, 3), "length": [3, 3]}, n_sequences=1, encoding=None
    )
    source._encodings = marker = ["kept"]
    ids = source["input_ids"]
    result = dlx.convert({"batch": source}, to="numpy")["batch"]
    assert type(result) is type(source) and result._encodings is marker and result.n_sequences == 1
    assert type(result["input_ids"]) is np.ndarray and dlx.shares_memory(result["input_ids"], ids)
    assert result.input_ids is result["input_ids"] and source["input_ids"] is ids and result["length"] == [3, 3]
    view = dlx.convert(source, to="numpy", lazy=True)
    assert view.input_ids is view["input_ids"] and type(view.materialize()) is type(source)


def test_a_model_output_keeps_attributes_and_items_alike(np, torch):
    """Transformers' ModelOutput is an OrderedDict and a dataclass with equal items and attributes."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    source = outputs.BaseModelOutput(
        last_hidden_state=torch.ones(2, 2), hidden_states=(torch.ones(1), torch.zeros(1)), attentions=None
    )
    hidden = source.last_hidden_state
    result = dlx.convert(source, to="numpy")
    assert type(result) is type(source) and list(result) == ["last_hidden_state", "hidden_states"]
    assert type(result.last_hidden_state) is np.ndarray and result["last_hidden_state"] is result.last_hidden_state
    assert type(result.hidden_states) is tuple and result.hidden_states[0] is result["hidden_states"][0]
    assert result.attentions is None and result[0] is result.last_hidden_state
    assert source.last_hidden_state is hidden and source["last_hidden_state"] is hidden
    view = dlx.convert(source, to="numpy", lazy=True)
    assert type(view.last_hidden_state) is np.ndarray and view.last_hidden_state is view["last_hidden_state"]


def test_containers_of_frameworks_leak_nothing(np, torch):
    """Successful and failed conversions leave no managed tensor."""
    live = native.live()
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0)])
    for _ in range(20):
        dlx.convert([packed, torch.max(torch.ones(2, 2), dim=0)], to="numpy")
        with pytest.raises(errors.DlxError):
            dlx.convert([packed, torch.nn.ParameterList([torch.ones(1)])], to="numpy")
    gc.collect()
    assert native.live() == live
