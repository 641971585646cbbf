"""A griffe extension: types and defaults of parameters that share a line in a docstring."""

from typing import Any

import griffe


class Shared(griffe.Extension):
    """For ``detach, device, readonly`` on one line, griffe uses the type and default of the first name."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Take types and defaults of parameters from the signature."""
        for section in func.docstring.parsed if func.docstring else []:
            if section.kind is griffe.DocstringSectionKind.parameters:
                for each in section.value:
                    if each.name in func.parameters:
                        parameter = func.parameters[each.name]
                        each.annotation, each.value = parameter.annotation, parameter.default

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Take types of attributes from the class body."""
        for section in cls.docstring.parsed if cls.docstring else []:
            if section.kind is griffe.DocstringSectionKind.attributes:
                for each in section.value:
                    if each.name in cls.members and each.annotation is None:
                        each.annotation = cls.members[each.name].annotation
