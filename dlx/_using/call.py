"""`Invocation`: one call of a decorated function that the fast path in C does not support."""

from __future__ import annotations

import sys
from typing import Any

from dlx._engine.traced import leave_out
from dlx._support.tracebacks import name_action, shorten
from dlx._using.function_spec import FunctionSpec
from dlx._using.identity import Identity
from dlx._using.inputs import Inputs
from dlx._using.outputs import Caller, Outputs
from dlx.errors import DlxError


class Invocation:
    """One call of a decorated function; `args` and `options` are the converted arguments."""

    def __init__(self, spec: FunctionSpec, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs: Any = None
        identity: Any = None
        try:
            request = spec.request()
            identity = Identity(args[: spec.skipped], request.target)
            inputs = Inputs(spec, request, identity)
            positional, self.options = inputs.convert_arguments(args[spec.skipped :], options)
            caller = Caller.of(spec, request.target, inputs.seen)
        except BaseException as error:
            vars(self).clear()  # this frame is in the traceback, and would keep the converted arrays alive
            inputs, failed, positional, identity = None, inputs, None, None
            if failed is not None:
                failed.undo(error)
            del failed
            name_action(error, "convert", ("detach", "device", "readonly", "stream"))  # the options of `using`
            shorten(error, own=False)
            raise
        inputs.keep()
        self.args, self.work, self._writes = (*identity.kept, *positional), inputs.work, inputs.writes
        self.work.stays = caller is None or spec.lazy  # otherwise converting the results orders the streams
        self.convert_sent, self.convert_result = inputs.convert_sent, Outputs(spec, request, identity, caller).convert

    def __enter__(self) -> Invocation:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, finalizing: Any = sys.is_finalizing) -> None:
        if isinstance(error, GeneratorExit) and finalizing():
            return  # a generator that is closed at exit, when modules are already cleared
        try:
            with self.work.step():
                self.write_back()
        except DlxError:
            if error is None or isinstance(error, GeneratorExit):
                raise

    def write_back(self) -> None:
        """Copy the function's writes back to the caller's arrays."""
        self._writes.write_back()


leave_out(Invocation.__init__, "what dlx.using returns")
