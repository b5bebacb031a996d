"""Tables by the ten values that describe them, which are what `describe_table` takes."""

import torch

from ibp._rows.handle import Handle, Parts
from ibp._rows.table import handle_on

_SIZES = {"encode_into": 12, "move_parts": 12}  # of the values of a place, with rooms and used


def values_of(table, device):
    """The ten values that describe a table on a device."""
    return list(handle_on(table, device).parts[:10])


def handle_of(*values):
    """The argument `table` of operations, by the values that describe it."""
    return Handle(Parts(*values)).table


def takes_table(name):
    """Whether an operation takes a handle."""
    operation, _, overload = name.partition(".")
    arguments = getattr(getattr(torch.ops.ibp, operation), overload or "default")._schema.arguments
    return arguments[0].name == "table"


def with_handle(name, arguments):
    """The arguments of an operation. If it takes a table, the first arguments are the values that describe it."""
    size = _SIZES.get(name, 10)
    return (handle_of(*arguments[:size]), *arguments[size:]) if takes_table(name) else arguments


class _ByValues:
    """torch.ops.ibp, with the values that describe a table in the place of its handle."""

    def __getattr__(self, name):
        return lambda *arguments, **options: getattr(torch.ops.ibp, name)(*with_handle(name, arguments), **options)


BY_VALUES = _ByValues()
