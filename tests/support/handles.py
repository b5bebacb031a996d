"""Passes tables to operations by the ten values that describe them, which are the arguments of `describe_table`."""

import torch

from ibp._rows.handle import Handle, Parts
from ibp._rows.table import handle_on

_SIZES = {"encode_into": 12, "move_parts": 12}  # A place has more values than a table: also `rooms` and `used`.


def values_of(table, device):
    """Returns the ten values that describe a table on a device."""
    return list(handle_on(table, device).parts[:10])


def handle_of(*values):
    """Returns the argument `table` of operations for the values that describe a table."""
    return Handle(Parts(*values)).table


def takes_table(name):
    """Returns whether an operation takes a handle."""
    operation, _, overload = name.partition(".")
    arguments = getattr(getattr(torch.ops.ibp, operation), overload or "default")._schema.arguments
    return arguments[0].name == "table"


def with_handle(name, arguments):
    """Returns the arguments of an operation. If it takes a table, the first of the given arguments are the values that
    describe it, and a handle replaces them."""
    size = _SIZES.get(name, 10)
    return (handle_of(*arguments[:size]), *arguments[size:]) if takes_table(name) else arguments


class _ByValues:
    """torch.ops.ibp, except that operations take the values that describe a table instead of its handle."""

    def __getattr__(self, name):
        return lambda *arguments, **options: getattr(torch.ops.ibp, name)(*with_handle(name, arguments), **options)


BY_VALUES = _ByValues()
