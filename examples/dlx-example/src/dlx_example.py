"""examplearray for dlx: `examplearray.Array` and `examplearray.Bundle`. Written like a third party's plugin.

Versions: 0.2 and later. Devices: the host. Dtypes: truth8 (bool), uint8, int32, int64, float32, float64, brain16
(bfloat16), posit16 (opaque), quarter8 (float8_e5m2, by a view of uint8).
Shared: every layout, any alignment, read-only preserved. Copied: negated arrays.
"""

from __future__ import annotations

from typing import Any

from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Arrays,
    Blocker,
    Capabilities,
    Container,
    Description,
    Device,
    DTypes,
    FastPath,
    Guard,
    KnownIssue,
    Layout,
    Tensor,
    offer,
    over_memory,
    type_name,
)

HOST = Device("cpu")


def _flatten(bundle: Any) -> tuple[list[Any], list[Any]]:
    return list(bundle), list(bundle.values())


def _new_empty(bundle: Any) -> Any:
    return type(bundle)(bundle.label)


def _unflatten(bundle: Any, keys: list[Any] | None, children: list[Any], new_empty: Any) -> Any:
    made = _new_empty(bundle) if new_empty is None else new_empty  # set if the bundle contains itself
    for name, child in zip(keys or (), children, strict=True):
        made.put(name, child)
    return made


NEGATED = Blocker("its memory holds the negatives of its values (is_negated)", resolution="resolve", needs="copy")


class ExampleAdapter(Adapter):
    """Adapter for examplearray's arrays and bundles."""

    name = package = "examplearray"
    install = "pip install dlx-example"
    types = ("examplearray.Array",)
    dtypes = DTypes(
        "examplearray",
        {
            "bool": "truth8",
            "uint8": "uint8",
            "int32": "int32",
            "int64": "int64",
            "float32": "float32",
            "float64": "float64",
            "bfloat16": "brain16",
            "code3_16bit": "posit16",  # DLPack's code for dtypes that only their owners understand
            "float8_e5m2": "quarter8",
        },
        storage={"float8_e5m2": "uint8"},  # the dtype that its from_dlpack accepts for quarter8
    )
    containers = (
        Container(
            types=("examplearray.Bundle",), kind="mapping", flatten=_flatten, unflatten=_unflatten, new_empty=_new_empty
        ),
    )
    arrays = Arrays(alignment=64)
    fast_path = FastPath(  # requesting an array's memory twice is harmless
        types=("examplearray.Array",), guards=(Guard("is_negated", NEGATED),)
    )
    known_issues = (
        KnownIssue(
            does="from_dlpack forgets that memory is read-only",
            see="the changes of examplearray 0.3",
            before="0.3",
            lowers={"keeps_readonly": False},
        ),
    )

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> Description:
        info = ArrayInfo(
            framework=self.name,
            type_name=type_name(type(obj)),
            dtype=self.dtypes.from_native(obj.dtype),
            dtype_name=obj.dtype.name,
            shape=obj.shape,
            strides=obj.strides,
            device=HOST,
            nbytes=obj.nbytes,
            readonly=obj.readonly,
            address=obj.address if obj.size else 0,
            owner=type_name(type(obj)),
            protocols=("__dlpack__", "__dlpack_c_exchange_api__"),
            notes=("is_negated",) if obj.is_negated else (),
        )
        return Description(info, (NEGATED,) if obj.is_negated else ())

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        if obj.dtype.travels:
            return super().export(obj)
        dtype = self.dtypes.from_native(obj.dtype)
        assert dtype is not None
        address = obj.address if obj.size else 0
        return over_memory(address, obj.shape, obj.strides, dtype, HOST, readonly=obj.readonly, owner=obj)

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=self.dtypes.known(),
            layouts=Layout.ANY,
            min_alignment=1,
            ndims=(0, 8),
            keeps_readonly=True,
        )

    def load(self, tensor: Tensor) -> Any:
        import examplearray  # imported here: nothing is imported before it is needed

        return examplearray.from_dlpack(tensor)

    # ---- inside the framework ---------------------------------------------------------------------------------------

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        return obj.copy()


dlx_adapters = offer(ExampleAdapter())
