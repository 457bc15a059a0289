"""The layers: which folder may import what, read from the source. `radix` and `kernels` stand alone.

Imports nothing of the project, so that it says what is wrong even where an import fails.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("radix", "kernels", "runtime", "frontend")
LOWER = {"radix": (), "kernels": (), "runtime": ("radix", "kernels"), "frontend": ("runtime",)}
# The two that stand alone take nothing from the world but this. The test kit adds Hypothesis.
WORLD = {"radix": {"numpy", "sortedcontainers"}, "kernels": {"numpy", "torch", "triton"}}
TEST_KIT = {"hypothesis", "pytest"}

Import = tuple[int, int, str, tuple[str, ...]]  # line, relative level, module, names


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import, wherever it stands: inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or "", tuple(alias.name for alias in node.names)


def violations(path: str, source: str, public: frozenset[str]) -> list[str]:
    """What the file at `path` (`radix/tree.py`) imports that its layer must not; `public`: the names of runtime."""
    found = []
    folder = path.split("/")[0]
    depth = path.count("/")  # how many dots lead from the file to its layer's folder
    for line, level, module, names in imports(ast.parse(source)):
        where = f"{path}:{line}"
        top, _, rest = module.partition(".")
        layer = rest.partition(".")[0]
        if level > depth:
            found.append(f"{where}: a relative import leaves {folder}/; across folders write radixrt.<folder>")
        elif level:
            continue
        elif top in FOLDERS:
            found.append(f"{where}: {module} is radixrt.{module} under a second name")
        elif top != "radixrt":
            allowed = WORLD.get(folder)
            if path.endswith("/testing.py") and allowed is not None:
                allowed = allowed | TEST_KIT
            if allowed is not None and top not in allowed | sys.stdlib_module_names:
                found.append(f"{where}: {folder} does not know {top}")
        elif layer == folder:
            found.append(f"{where}: inside {folder}/ imports are relative")
        elif layer not in LOWER[folder]:
            found.append(f"{where}: {folder} must not import {module}")
        elif folder == "frontend" and (module != "radixrt.runtime" or not names or not public.issuperset(names)):
            asked = ", ".join(sorted(set(names) - public)) or module
            found.append(f"{where}: frontend takes only names of radixrt.runtime.__all__, not {asked}")
    return found


def public_names(init: Path) -> frozenset[str]:
    """`__all__` of a package, read and not run."""
    for node in ast.parse(init.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return frozenset(ast.literal_eval(value))
    raise AssertionError(f"{init} has no __all__")


@pytest.mark.parametrize("folder", FOLDERS)
def test_layer(folder: str) -> None:
    public = public_names(ROOT / "runtime" / "__init__.py")
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ has no source"
    found = [v for f in files for v in violations(f.relative_to(ROOT).as_posix(), f.read_text(), public)]
    assert not found, "\n".join(found)


def test_the_face_offers_only_public_names() -> None:
    names = public_names(ROOT / "src" / "radixrt" / "__init__.py") - {"__version__"}
    faces = ("language", "planner", "url")
    homes = ("radix/__init__.py", "runtime/__init__.py", *(f"frontend/{name}.py" for name in faces))
    assert names <= frozenset().union(*(public_names(ROOT / home) for home in homes))


ALLOWED = [
    ("radix/tree.py", "import numpy as np\nfrom .node import Node\nfrom collections import deque"),
    ("radix/testing.py", "import hypothesis"),
    ("kernels/cpu/paged.py", "import torch\nfrom ..reference import attend"),
    ("runtime/engine.py", "from radixrt.radix import RadixCache\nfrom radixrt.kernels.cpu.paged import attend"),
    ("runtime/testing.py", "import transformers\nfrom .batch import Batch"),
    ("frontend/cli.py", "from radixrt.runtime import Engine\nimport typer"),
]
REFUSED = [
    ("radix/tree.py", "import torch"),
    ("radix/tree.py", "import hypothesis"),
    ("radix/tree.py", "from radixrt.radix.node import Node"),
    ("radix/tree.py", "def f():\n    from radixrt.runtime import Engine"),
    ("radix/tree.py", "from ..runtime import Engine"),
    ("radix/tree.py", "from .. import runtime"),
    ("radix/tree.py", "import radixrt"),
    ("radix/tree.py", "import kernels"),
    ("kernels/cpu/paged.py", "from ...runtime import batch"),
    ("kernels/cpu/paged.py", "from radixrt.radix import RadixCache"),
    ("kernels/reference.py", "import transformers"),
    ("runtime/engine.py", "import radixrt.frontend.cli"),
    ("runtime/engine.py", "from radix import RadixCache"),
    ("runtime/engine.py", "from radixrt import Engine"),
    ("frontend/cli.py", "from radixrt.radix import RadixCache"),
    ("frontend/cli.py", "from radixrt.runtime import Hidden"),
    ("frontend/cli.py", "from radixrt.runtime.engine import Engine"),
    ("frontend/cli.py", "import radixrt.runtime"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_the_check_accepts(path: str, source: str) -> None:
    assert violations(path, source, frozenset({"Engine"})) == []


@pytest.mark.parametrize(("path", "source"), REFUSED)
def test_the_check_refuses(path: str, source: str) -> None:
    assert len(violations(path, source, frozenset({"Engine"}))) == 1
