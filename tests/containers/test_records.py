"""Models of pydantic and structs of msgspec are records, like dataclasses and attrs classes."""

from __future__ import annotations

import functools
import pickle
import typing

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
T = typing.TypeVar("T")


@functools.cache
def models():
    """Return the module's models; only the tests import pydantic, not dlx."""
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, frozen=True)
        w: np.ndarray

    class Model(pydantic.BaseModel, typing.Generic[T]):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow")
        x: np.ndarray
        inner: Inner | None = None
        size: int = 3
        other: typing.Any = None
        _private: dict = pydantic.PrivateAttr(default_factory=dict)

        @functools.cached_property
        def twice(self):
            return self.x * 2

        @pydantic.field_validator("x")
        @classmethod
        def is_array(cls, value):
            assert isinstance(value, np.ndarray)
            return value

        def model_post_init(self, context):
            self._private["made"] = self._private.get("made", 0) + 1

    return Inner, Model


def model(**fields):
    """Return a model with an array and a frozen model."""
    inner, kind = models()
    return kind(x=np.arange(2.0), inner=inner(w=np.ones(3)), **fields)


def structs():
    """Return a frozen struct and a mutable one."""
    msgspec = pytest.importorskip("msgspec")

    class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
        x: typing.Any
        other: typing.Any = None

    class Struct(msgspec.Struct, dict=True, tag=True, weakref=True):
        x: typing.Any
        other: typing.Any = None
        made: int = 0

        def __post_init__(self):
            self.made += 1

    return Frozen, Struct


def test_a_model_is_rebuilt_without_its_validators():
    """Fields, extra fields, private attributes and the class are kept; cached values are not."""
    torch = pytest.importorskip("torch")
    _, kind = models()
    source = model(more=np.zeros(1), label="name")
    before, extra = dict(source.__dict__), dict(source.__pydantic_extra__)
    assert source.twice.tolist() == [0, 2]
    new = dlx.convert(source, to="torch")
    assert type(new) is kind and type(new.inner) is type(source.inner)
    assert [type(each) for each in (new.x, new.inner.w, new.more, new.twice)] == [torch.Tensor] * 4
    assert dlx.shares_memory(new.x, source.x) and (new.size, new.label, new._private) == (3, "name", {"made": 1})
    assert type(new.__pydantic_extra__["more"]) is torch.Tensor and "more" not in new.__dict__
    assert set(new.__pydantic_extra__) == {"more", "label"} and new.model_dump().keys() == source.model_dump().keys()
    assert list(new.__dict__)[:4] == list(before) and new.__pydantic_fields_set__ == source.__pydantic_fields_set__
    # Nothing that the new one writes to is the source's.
    new.size, new.more, new.other = 4, 5, 6
    new._private = {}
    assert {name: source.__dict__[name] for name in before} == before and source.__pydantic_extra__ == extra
    assert source._private == {"made": 1} and "other" not in source.__pydantic_fields_set__
    assert isinstance(dlx.convert(kind[int](x=np.ones(1)), to="torch"), kind[int])


def test_a_frozen_model_without_an_array_stays_the_same_object():
    """Like a frozen dataclass; other models are new."""
    inner, kind = models()
    frozen = inner.model_construct(w="no array")
    mutable = kind.model_construct(x="no array")
    result = dlx.convert([frozen, mutable, dlx.empty(1, "int8")], to="dlx")
    assert result[0] is frozen and result[1] is not mutable and result[1] == mutable
    for each in (frozen, mutable):
        with pytest.raises(errors.AdapterNotFoundError, match=r"holds no array: obj\.") as caught:
            dlx.convert(each, to="dlx")
        assert caught.value.where == ""


def test_a_root_model_and_an_unset_field():
    """Unset fields stay unset."""
    pydantic = pytest.importorskip("pydantic")
    root = pydantic.RootModel[typing.Any]([np.ones(2)])
    assert type(dlx.convert(root, to="dlx").root[0]) is dlx.Tensor
    _, kind = models()
    partial = kind.model_construct(x=np.ones(1))
    del partial.__dict__["size"]
    new = dlx.convert(partial, to="dlx")
    assert type(new.x) is dlx.Tensor and "size" not in new.__dict__


def test_a_model_of_the_first_pydantic():
    """It is part of pydantic 2."""
    v1 = pytest.importorskip("pydantic.v1")

    class Old(v1.BaseModel):
        x: typing.Any

    source = Old(x=np.ones(1))
    new = dlx.convert(source, to="dlx")
    assert type(new) is Old and type(new.x) is dlx.Tensor and new.__fields_set__ == {"x"}
    assert new.__fields_set__ is not source.__fields_set__


def test_a_struct_is_rebuilt_without_its_hook():
    """Frozen structs are rebuilt, too; their hash depends on the new fields."""
    frozen, kind = structs()
    source = kind(np.arange(2.0))
    source.note = "kept"
    new = dlx.convert(source, to="dlx")
    assert type(new) is kind and type(new.x) is dlx.Tensor and (new.made, new.note) == (1, "kept")
    assert type(source.x) is np.ndarray and dlx.shares_memory(new.x, source.x)
    new.note = "changed"
    assert source.note == "kept"
    old = frozen(x=(1, 2), other=np.ones(1))
    made = dlx.convert(old, to="dlx")
    assert type(made) is frozen and type(made.other) is dlx.Tensor and made.x == (1, 2)
    plain = frozen(x=(1, 2))
    assert (
        hash(plain) == hash(frozen(x=(1, 2))) and dlx.convert([plain, b"", dlx.empty(1, "int8")], to="dlx")[0] is plain
    )
    unset = kind(np.ones(1))
    del unset.other
    with pytest.raises(errors.ConversionError, match="'other'"):  # msgspec does not copy such a structure
        dlx.convert(unset, to="dlx")


def test_fields_of_a_struct_that_are_called_like_an_arrays():
    """Such field names do not make it an array."""
    msgspec = pytest.importorskip("msgspec")
    spec = msgspec.defstruct("Spec", [("shape", tuple), ("dtype", str), ("numpy", object)])((1,), "f4", np.ones(1))
    assert type(dlx.convert(spec, to="dlx").numpy) is dlx.Tensor


MAKERS = {
    "model": lambda x, other: model_like(x, other),
    "struct": lambda x, other: structs()[1](x, other),
}


def model_like(x, other):
    """Return a model without validation."""
    _, kind = models()
    return kind.model_construct(x=x, other=other)


@pytest.mark.parametrize("name", MAKERS)
def test_records_in_every_verb(name):
    """Trees, views, plans, arguments and shared memory; identity and cycles; error paths."""
    make = MAKERS[name]
    x = np.arange(2.0)
    source = make(x, [x, b"data"])
    new = dlx.convert({"a": source, "again": source}, to="dlx")
    assert new["a"] is new["again"] and new["a"].x is new["a"].other[0] and new["a"].other[1] == b"data"
    view = dlx.convert(source, to="dlx", lazy=True)
    assert view.x is view.other[0] and type(view.x) is dlx.Tensor and type(view.materialize()) is type(source)
    view.other = 7
    assert source.other == 7
    source.other = None
    assert [leaf.path for leaf in dlx.plan(source, to="dlx").leaves] == ["obj.x"]

    @dlx.using("dlx")
    def function(record):
        assert type(record) is type(source) and type(record.x) is dlx.Tensor
        return record, record.x

    assert function(source) == (source, x) if name == "struct" else function(source)[0] is source
    with dlx.share(source) as handle:
        assert dlx.attach(handle, to="numpy")["x"].tolist() == [0, 1]
    ring = make(x, None)
    ring.other = [ring]
    turned = dlx.convert(ring, to="dlx")
    assert turned.other[0] is turned and ring.other[0] is ring
    with pytest.raises(errors.AdapterNotFoundError) as caught:
        dlx.convert([make(x, iter([x]))], to="dlx")
    assert caught.value.where == "obj[0].other"


def test_results_are_pickled():
    """Their classes are found by name."""
    frozen, _ = structs()
    globals()["Frozen"] = frozen
    frozen.__qualname__ = "Frozen"
    back = pickle.loads(pickle.dumps(dlx.convert(dlx.convert(frozen(x=np.ones(2)), to="dlx"), to="numpy")))
    assert back.x.tolist() == [1, 1] and type(back) is frozen


def test_dlx_imports_neither(python):
    """It identifies them by the names of their bases."""
    python(
        """
        import sys, dlx
        dlx.convert([object(), b""], to="dlx")
        assert not {"pydantic", "msgspec"} & set(sys.modules)
        """
    )
