"""Finds the functions that the package offers its users."""

import inspect

import ibp
from ibp import adapters, cache, calibration, checkpoints, codecs, deltas, distributed, kv, nn, optim, spill

MODULES = (ibp, adapters, cache, calibration, checkpoints, codecs, deltas, distributed, kv, nn, optim, spill)


def public_functions():
    """Returns (name, function) of the public functions, and of the public methods and properties of the public classes.
    A function with two names is listed by the first."""
    seen = set()
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing
            elif inspect.isclass(thing):
                for method, value in vars(thing).items():
                    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                    if (
                        inspect.isfunction(value)
                        and value.__module__.startswith("ibp")
                        and (method == "__init__" or not method.startswith("_"))
                    ):
                        yield f"{module.__name__}.{name}.{method}", value
