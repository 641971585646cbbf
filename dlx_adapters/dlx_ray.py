"""The ray adapter: refuse ObjectRef, a reference to an object in ray's store or to the result of a task.

The referenced object is unknown and may not exist yet, so the error names its path and suggests
``dlx.convert(ray.get(ref), to=...)``. Fetched arrays share the store's memory: `dlx.Tensor` pickles out of band. To
store a container with any dtypes, use ``ray.put(dlx.convert(tree, to="dlx"))``.

`register_transport` lets the actors of one node exchange arrays in dlx's shared memory instead of ray's store.
"""

from __future__ import annotations

import importlib
from typing import Any

import dlx
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


def register_transport(to: str) -> str:
    """Register a tensor transport for the arrays of a framework, and return its name, such as ``"DLX_NUMPY"``.

    Call it before the actors are created, and mark their methods: ``@ray.method(tensor_transport="DLX_NUMPY")``. Their
    arrays then go to other actors of this node in shared memory. Arrays in shared memory are not copied, others once.
    """
    experimental: Any = importlib.import_module("ray.experimental")
    base: Any = importlib.import_module("ray.experimental.rdt.tensor_transport_manager")
    name = f"DLX_{to.upper()}"

    class Transport(base.TensorTransportManager):  # type: ignore[misc]
        """Sends a handle with the metadata of an object; the receiver attaches it."""

        def __init__(self) -> None:
            self.handles: dict[str, Any] = {}

        tensor_transport_backend = staticmethod(lambda: name)
        is_one_sided = can_abort_transport = staticmethod(lambda: True)  # nothing waits
        actor_has_tensor_transport = staticmethod(lambda actor: True)
        get_communicator_metadata = staticmethod(lambda *_: base.CommunicatorMetadata())
        send_multiple_tensors = None  # the receiver attaches

        def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Any) -> Any:
            self.handles[obj_id] = dlx.share(list(rdt_object))
            known = [(each.shape, each.dtype) for each in rdt_object]
            found = base.TensorTransportMetadata(tensor_meta=known, tensor_device="cpu")
            found.handle = dict(self.handles[obj_id])
            return found

        def recv_multiple_tensors(
            self, obj_id: str, metadata: Any, communicator: Any, target_buffers: Any = None
        ) -> Any:
            found = dlx.attach(metadata.handle, to, writable=True)
            return found if target_buffers is None else dlx.convert(found, out=target_buffers)

        def abort_transport(self, obj_id: str, *_: Any) -> None:
            self.handles.pop(obj_id, None)

        garbage_collect = abort_transport

    data_type = type(dlx.convert(dlx.empty((1,), "float32"), to))
    experimental.register_tensor_transport(name, ["cpu"], Transport, data_type)
    return name


dlx_adapters = offer(RayAdapter())
