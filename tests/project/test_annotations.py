"""What type checkers see of the package: py.typed, annotations of everything public, a stub of the extension module."""

import ast
import dataclasses
import inspect
import pathlib

import ibp
from ibp import _core
from public_names import public_functions

PACKAGE = pathlib.Path(ibp.__file__).parent


def test_reports_cannot_be_changed():
    """What calls return is for reading; statistics alone are counted further."""
    modules = [ibp, *(module for name in ibp.__all__ if inspect.ismodule(module := getattr(ibp, name)))]
    public = {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())}
    made = {name: kind for name, kind in public.items() if dataclasses.is_dataclass(kind)}
    assert len(made) > 10
    assert [name for name, kind in made.items() if not kind.__dataclass_params__.frozen] == ["ActivationStats"]


def test_public_functions_are_annotated():
    functions = dict(public_functions())
    assert len(functions) > 200
    for name, function in functions.items():
        signature = inspect.signature(function)
        missing = [
            p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert not missing, f"{name}: {missing}"
        assert function.__name__ == "__init__" or signature.return_annotation is not signature.empty, name


def test_stub_of_the_extension():
    """ibp/_core.pyi names what the module has, and the package ships it beside py.typed."""
    assert (PACKAGE / "py.typed").exists()
    tree = ast.parse((PACKAGE / "_core.pyi").read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    constants = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert {*defined, *constants} == {name for name in dir(_core) if not name.startswith("__")}
    for name, node in defined.items():
        if isinstance(node, ast.ClassDef):
            for member in (item.name for item in node.body if isinstance(item, ast.FunctionDef)):
                # Python has __buffer__ from 3.12 on.
                assert member == "__buffer__" or hasattr(getattr(_core, name), member), f"{name}.{member}"
