"""ray for dlx: ObjectRef, a reference to an object in ray's store, or to one that a task has yet to return.

The object may be anything, and may not be there yet, so a reference is refused, by its path, with the call that fetches
it: ``dlx.convert(ray.get(ref), to=...)``. Fetched arrays share the store's memory already: `dlx.Tensor` pickles out of
band. ray is no target: ``ray.put(dlx.convert(tree, to="dlx"))`` puts a whole tree of any dtype at once.
"""

from __future__ import annotations

from typing import Any

from dlx.adapter import Adapter, ArrayInfo, Blocker, Description, offer, type_name
from dlx.errors import ConversionError

_NOT_FETCHED = Blocker(
    "it stands for an object in ray's store", "Pass what ray.get() gives of it.", ConversionError, also_blocks=("stay",)
)


class RayAdapter(Adapter):
    """ray.ObjectRef, as a source that is refused."""

    name = package = "ray"
    types = ("ray.ObjectRef",)

    def describe(self, obj: Any) -> Description:
        return Description(ArrayInfo(self.name, type_name(type(obj)), nbytes=None), (_NOT_FETCHED,))


dlx_adapters = offer(RayAdapter())
