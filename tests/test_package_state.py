"""State that can be seen: each attribute is born where its object is."""

import ast
import inspect
import pathlib
import re

import keras
import pytest

import keras_mixprec

ROOT = pathlib.Path(keras_mixprec.__file__).parent
CLASSES = {
    node.name: node
    for path in sorted(ROOT.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}


def stored(function):
    """The attributes of `self` that a method writes."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }


def methods(node):
    return [n for n in node.body if isinstance(n, ast.FunctionDef)]


def given_by_keras(name):
    """What Keras' own class of that name, and its bases, write."""
    owner = keras
    for part in name.split(".")[1:]:
        owner = getattr(owner, part)
    for base in owner.__mro__[:-1]:
        if base.__module__ == "collections.abc":
            continue  # Which has no attributes, and its source elsewhere.
        source = inspect.getsource(base)
        yield from re.findall(r"self\.(\w+)(?:: \w+)? = ", source)


def declared(node):
    """The attributes that an object of a class has when it is made."""
    names = {
        n for f in methods(node) if f.name == "__init__" for n in stored(f)
    }
    generated = "dataclass" in "".join(map(ast.dump, node.decorator_list))
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and (generated or line.value):
            names.add(line.target.id)
        elif isinstance(line, ast.Assign):
            names |= {target.id for target in line.targets}
    for base in map(ast.unparse, node.bases):
        if base in CLASSES:
            names |= declared(CLASSES[base])
        elif base.startswith("keras."):
            names |= {*given_by_keras(base)}
    return names


@pytest.mark.parametrize("name", CLASSES)
def test_no_attribute_is_born_outside_the_constructor(name):
    node = CLASSES[name]
    written = {n for f in methods(node) for n in stored(f)}
    setters = {
        f.name
        for f in methods(node)
        if any("setter" in ast.dump(d) for d in f.decorator_list)
    }
    assert written - setters <= declared(node)
