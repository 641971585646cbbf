"""The operators ``dlx::call`` and ``dlx::run`` of torch: functions of other frameworks in its graphs."""

from __future__ import annotations

import sys
from typing import Any

from dlx_adapters import dlx_torch_operators as own

torch: Any = sys.modules["torch"]

library = torch.library.Library("dlx", "FRAGMENT")  # it removes its operators when it is collected
for _name in ("call", "run"):
    library.define(f"{_name}(Tensor[] tensors, int number, str needs) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    library.impl(_name, own.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlx::{_name}", own.fake, lib=library)
    torch.library.register_vmap(f"dlx::{_name}", own.vmap, lib=library)
torch.library.register_autograd("dlx::call", own.backward, setup_context=own.keep, lib=library)
torch.library._register_effectful_op("dlx::run", torch._library.effects.EffectType.ORDERED)

operators = torch.ops.dlx
