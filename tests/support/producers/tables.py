"""A framework with failing or invalid exchange tables (`hostile.c`), as a plugin; for `producers.fuzz`."""

from __future__ import annotations

import sys
import types
from pathlib import Path

NAME = "fuzzlib"
KINDS = ("good", "good", "empty", "newer", "foreign", "misnamed", "number", "none", "raises")
FINAL = (KeyboardInterrupt, MemoryError, SystemExit)


def write(folder):
    """Compile the tables and write the plugin's metadata; return the folder, or an empty text without a compiler."""
    from support.project import compiled

    info = Path(folder) / f"{NAME}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dlx]\n{NAME} = dlx_{NAME}\n")
    try:
        Path(folder, "hostile.so").symlink_to(compiled("hostile"))
    except OSError:
        return ""
    return str(folder)


class Tables:
    """The framework, one per process."""

    def __init__(self, folder):
        import dlx
        from dlx.adapter import Adapter, Capabilities, FastPath, Layout
        from support.foreign.hostile import MODES, Hostile

        sys.path.insert(0, folder)
        self.library, self.modes = Hostile(str(Path(folder) / "hostile.so")), MODES
        self.library.set("takes")
        package = types.ModuleType(NAME)
        package.__version__ = "1.0"
        self.classes = [self._class(kind, number) for number, kind in enumerate(KINDS)]
        for kind in self.classes:
            setattr(package, kind.__name__, kind)

        class Lib(Adapter):
            name = package = NAME
            types = tuple(f"{NAME}.{kind.__name__}" for kind in self.classes)
            fast_path = FastPath(types)

            def capabilities(self):
                return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)

            def load(self, tensor):
                return made(None, tensor)

        made = self.classes[0]
        plugin = types.ModuleType(f"dlx_{NAME}")
        plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: [Lib()])
        sys.modules[NAME], sys.modules[plugin.__name__] = package, plugin
        dlx.convert(b"abc", to=NAME)

    def _class(self, kind, number):
        def init(self, case, give):
            self.case, self.give = case, give

        def dlpack(self, *, stream=None, max_version=None, dl_device=None, copy=None):
            self.case.calls["__dlpack__"] += 1
            return self.give()

        body = {"__init__": init, "__dlpack__": dlpack, "__dlpack_device__": lambda self: (1, 0), "__module__": NAME}
        made = type(f"{kind.capitalize()}{number}", (), body)
        which = kind if kind in ("good", "empty", "newer", "foreign") else "good"
        table = self.library.capsule(which, misnamed=kind == "misnamed")
        if kind == "number":
            table = self.library.table()
        if kind == "raises":
            table = property(lambda cls: 1 / 0)
        if kind != "none":
            made.__dlpack_c_exchange_api__ = table
        return made

    def family(self, case):
        """Return an array with a table; if its borrow slot fails or lies, ``__dlpack__`` answers instead."""
        from support.producers.tensors import Spec, account

        spec, rng = Spec(case.rng), case.rng
        spec.legacy, spec.name, spec.flags, spec.offset = False, b"dltensor_versioned", 0, 0
        account(case, spec)
        fields = {"shape": spec.shape, "strides": spec.strides, "dtype": spec.dtype}
        if spec.strides is None:
            fields["strides"] = None
        wrong = rng.choice(({}, {}, {}, {"rc": -1}, {"rc": -1, "error": True}, {"error": True}, {"ndim": -1},
                            {"ndim": 1000}, {"shape": None, "ndim": 2}, {"dtype": (2, 0, 1)}, {"dtype": (2, 32, 0)},
                            {"offset": 1 << 62}, {"rc": 1}, {"device": 2}, {"device": 99}))  # fmt: skip
        if spec.shape:
            wrong = rng.choice((wrong, wrong, {"shape": (-1,) * spec.ndim}, {"strides": (1 << 62,) * spec.ndim}))
        if "strides" in wrong and not any(extent > 1 for extent in spec.shape):
            wrong = {}
        case.tell("table", spec, wrong)
        self.library.lend(spec.data * (rng.random() > 0.05), **{**fields, **wrong})
        kind = rng.choice(self.classes)
        case.must_pass, case.is_own_memory = False, True
        return kind(case, lambda: case.new(spec).capsule)

    def arm(self, rng):
        """Set the consumer's next behaviour; return the class that it raises, or None."""
        mode = rng.choice(("takes", "takes", *self.modes))
        error = rng.choice((ValueError, *FINAL))
        self.library.set(mode, error)
        self.late = mode == "fails later"
        return error if mode == "raises" and error in FINAL else None

    def settle(self):
        """Call the deleter that the consumer deferred."""
        if getattr(self, "late", False) and self.library.imports:
            self.library.free.hostile_delete_kept(0)
        self.late = False
