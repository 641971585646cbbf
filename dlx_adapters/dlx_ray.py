"""The ray adapter: refuse ObjectRef, a reference to an object in ray's store or to the result of a task.

The referenced object is unknown and may not exist yet, so the error names its path and suggests
``dlx.convert(ray.get(ref), to=...)``. Fetched arrays share the store's memory: `dlx.Tensor` pickles out of band. To
store a container with any dtypes, use ``ray.put(dlx.convert(tree, to="dlx"))``.
"""

from __future__ import annotations

from typing import Any

from dlx.adapter import Adapter, ArrayInfo, Blocker, Description, offer, type_name
from dlx.errors import ConversionError

_NOT_FETCHED = Blocker(
    "it is a reference to an object of ray", "Pass the result of ray.get(x).", ConversionError, also_blocks=("stay",)
)


class RayAdapter(Adapter):
    """ray.ObjectRef, which is refused."""

    name = package = "ray"
    types = ("ray.ObjectRef",)

    def describe(self, obj: Any) -> Description:
        return Description(ArrayInfo(self.name, type_name(type(obj)), nbytes=None), (_NOT_FETCHED,))


dlx_adapters = offer(RayAdapter())
