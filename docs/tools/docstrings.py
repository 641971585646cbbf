"""Part of the site's build: parameters that share a line in a docstring have the types and defaults of their own."""

from typing import Any

import griffe


class Shared(griffe.Extension):
    """``detach, device, readonly`` on one line: griffe gives all of them what the first has."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Look names up in the signature."""
        for section in func.docstring.parsed if func.docstring else []:
            if section.kind is griffe.DocstringSectionKind.parameters:
                for each in section.value:
                    if each.name in func.parameters:
                        parameter = func.parameters[each.name]
                        each.annotation, each.value = parameter.annotation, parameter.default

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """The same for attributes."""
        for section in cls.docstring.parsed if cls.docstring else []:
            if section.kind is griffe.DocstringSectionKind.attributes:
                for each in section.value:
                    if each.name in cls.members and each.annotation is None:
                        each.annotation = cls.members[each.name].annotation
