"""What Python imports as a process of a test starts, so that this takes half the time.

No garbage is collected while torch is imported, nor once more at the end of the process. Torch imports its
compiler at the first step of an optimizer, to leave it out of compiled graphs: while nobody has imported the compiler,
there are none. Only it and sharded tensors need the shapes of all operations in Python, which torch imports as well.
Torch also reads its own source for the line that defines an operator, of which only the number is kept.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import sys
import types

COMPILER, SHAPES, DECOMPOSITIONS = "torch._dynamo", "torch._meta_registrations", "torch._decomp"


def disable_if_there(disable):
    """Of ``torch._compile._disable_dynamo``."""

    def disabled(function=None, recursive=True):
        if function is None:
            return functools.partial(disabled, recursive=recursive)
        without = disable(function, recursive)

        @functools.wraps(function)
        def call(*args, **more):
            return (without if COMPILER in sys.modules else function)(*args, **more)

        return call

    return disabled


def break_if_there(use_grad):
    """Of ``torch.optim.optimizer._use_grad_for_differentiable``, which breaks the graph around each step."""

    def used(function):
        with_breaks = use_grad(function)

        @functools.wraps(function)
        def call(self, *args, **more):
            if COMPILER in sys.modules:
                return with_breaks(self, *args, **more)
            torch = sys.modules["torch"]
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return function(self, *args, **more)

        return call

    return used


@contextlib.contextmanager
def changed(module, name, change):
    yield
    setattr(module, name, change(getattr(module, name)))


@contextlib.contextmanager
def quickly(module):
    enabled = gc.isenabled()
    gc.disable()
    sys.modules[SHAPES] = types.ModuleType(SHAPES)
    with_source, inspect.getframeinfo = inspect.getframeinfo, functools.partial(inspect.getframeinfo, context=0)
    try:
        yield
        module._C._set_generator_metaclass(
            importlib.import_module("torch._opaque_base").OpaqueBaseMeta
        )  # as they would
    finally:
        sys.modules.pop(SHAPES, None)
        inspect.getframeinfo = with_source
        gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def with_shapes(module):
    importlib.import_module(SHAPES)
    yield


AROUND = {
    "torch": quickly,
    COMPILER: with_shapes,
    "torch.distributed.tensor": with_shapes,
    "torch._compile": functools.partial(changed, name="_disable_dynamo", change=disable_if_there),
    "torch.optim.optimizer": functools.partial(changed, name="_use_grad_for_differentiable", change=break_if_there),
}


class There:
    """Loads a module that has been imported meanwhile."""

    @staticmethod
    def create_module(spec):
        return sys.modules[spec.name]

    @staticmethod
    def exec_module(module):
        pass


class Finder:
    """What is done around the import of a module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == DECOMPOSITIONS and SHAPES not in sys.modules:
            importlib.import_module(SHAPES)  # which imports it: the other way around their imports are circular
            spec = sys.modules[name].__spec__
            spec.loader = There
            return spec
        if name not in AROUND:
            return None
        others = (finder for finder in sys.meta_path if finder is not Finder and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module):
                with AROUND[name](module):
                    run(module)

            spec.loader.exec_module = exec_module
        return spec


atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder)
