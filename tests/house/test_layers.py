"""Layers import only those to their left, one file touches JAX, public names are explained."""

import ast
import inspect
import pathlib

import pytest

import fedgrad as fg

ROOT = pathlib.Path(fg.__file__).parent
LAYERS = [
    {"core"},
    {"pytorch"},
    {"clients"},
    {"aggregate"},
    {"planning"},
    {"ad"},
    {"execution"},
    {"federation"},
    {"algorithms"},
    {"tuning"},
    {"show"},
    {"training"},
    {"tasks"},
    {"reports"},
    {"cli", "__main__"},
]
MODULES = sorted(ROOT.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))


def level(part: str) -> int:
    """The position of a layer, by the name of its package or module."""
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def imports(source: str, package: str) -> set[str]:
    """Everything that a module imports, anywhere in it, by absolute dotted name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imported_by(path: pathlib.Path) -> set[str]:
    package = ".".join(["fedgrad", *path.relative_to(ROOT).parent.parts])
    return imports(path.read_text(encoding="utf-8"), package)


def violations(own: str, imported: set[str]) -> list[str]:
    parts = [name.split(".") for name in imported if name.split(".")[0] == "fedgrad"]
    bad = [".".join(p) for p in parts if len(p) == 1 or not _layer(p[1])]
    bad += [".".join(p) for p in parts if len(p) > 1 and _layer(p[1]) and level(p[1]) > level(own)]
    return bad


def _layer(name: str) -> bool:
    return any(name in layer for layer in LAYERS)


@every_module
def test_a_module_imports_only_layers_to_its_left(path):
    parts = path.relative_to(ROOT).parts
    if parts in (("__init__.py",), ("executors.py",)):
        pytest.skip("the public API collects from all layers")
    own = parts[0].removesuffix(".py")
    assert _layer(own), f"{own} is not a layer: {LAYERS}"
    assert violations(own, imported_by(path)) == []


def test_the_layering_check_sees_violations():
    inside = "def f():\n    from ..planning import plan\n"
    assert violations("core", imports(inside, "fedgrad.core")) == ["fedgrad.planning.plan"]
    own = "fedgrad.planning"
    assert violations("planning", imports("import fedgrad.execution.local", own)) == [
        "fedgrad.execution.local"
    ]
    assert violations("planning", imports("from fedgrad import program", own))
    assert not violations("planning", imports("from fedgrad.core import graph", own))


@every_module
def test_internals_of_jax(path):
    private = {n for n in imported_by(path) if n.startswith("jax._src")}
    extended = {n for n in imported_by(path) if n.startswith(("jax.interpreters", "jax.extend"))}
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    assert not private and not any(a.startswith("jax._src") for a in attributes)
    if path.relative_to(ROOT).as_posix() == "core/primitives.py":
        assert extended
    else:
        assert not extended
        assert not any(a.startswith(("jax.interpreters", "jax.extend")) for a in attributes)


PUBLIC = sorted(getattr(fg, "__all__", [name for name in vars(fg) if not name.startswith("_")]))
PUBLIC += [f"executors.{name}" for name in fg.executors.__all__]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_explained(name):
    value = fg
    for part in name.split("."):
        value = getattr(value, part)
    assert inspect.getdoc(value if not isinstance(value, fg.Placement) else type(value))
    if inspect.isclass(value):
        methods = [m for m in vars(value).values() if inspect.isfunction(m)]
        methods += [m.fget for m in vars(value).values() if isinstance(m, property)]
        missing = [m.__name__ for m in methods if not m.__name__.startswith("_") and not m.__doc__]
        assert missing == []
        doc = value.__doc__ or ""
        assert not doc.startswith(f"{value.__name__}("), "the docstring that dataclasses make up"


@every_module
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_the_surface_of_the_design_is_there():
    surface = "CLIENTS Placement program broadcast sum mean cohort population plan executors"
    errors = "FederatedError PlacementError CohortError ArgumentError PlanError"
    missing = [name for name in f"{surface} {errors} client_key".split() if not hasattr(fg, name)]
    assert missing == []
