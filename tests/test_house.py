"""The house's rules: which room may import which, and how long the loop may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STANDARD = set(sys.stdlib_module_names)
ROOMS = {"llama", "parallel", "data", "checkpoints", "fabric_train"}
MAY_IMPORT = {
    "llama/config.py": set(),
    "llama/model.py": {"torch", "llama"},
    "llama/hf.py": {"torch", "safetensors", "llama"},
    "llama/meta.py": {"torch", "llama"},
    "llama/generate.py": {"torch", "llama"},
    "llama/__main__.py": {"torch", "llama", "data", "checkpoints"},  # a program, as fabric_train.py is
    "parallel/layout.py": {"llama"},
    "parallel/parallelize.py": {"torch", "llama"},
    "data/order.py": {"torch"},
    "data/tokens.py": {"torch", "numpy", "data"},
    "data/prepare.py": {"numpy", "data"},
    "data/read.py": set(),
    "data/__main__.py": {"data", "tqdm"},
    "data/tokenizer.py": {"tokenizers", "tiktoken"},
    "checkpoints/folders.py": {"torch", "numpy", "lightning"},
    "checkpoints/lock.py": set(),
    "checkpoints/convert.py": {"torch", "safetensors", "llama", "checkpoints"},
    "checkpoints/__main__.py": {"checkpoints"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(p for room in ROOMS for p in (ROOT / room).glob("*.py")), ids=lambda p: p.stem)
def test_imports_run_one_way(path):
    name = f"{path.parent.name}/{path.name}"
    modules = imports(path)
    outside = {module.split(".")[0] for module in modules} - STANDARD
    if path.name == "__init__.py":
        assert outside <= {path.parent.name}
    else:
        assert outside <= MAY_IMPORT[name], f"{name} imports {sorted(outside - MAY_IMPORT[name])}"
    if name == "llama/model.py":
        assert not [module for module in modules if module.startswith("torch.distributed")]


def test_the_loop_is_short_and_flat():
    tree = ast.parse((ROOT / "fabric_train.py").read_text())
    train = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    assert train.end_lineno - train.lineno + 1 < 80
    assert not [n for n in ast.walk(train) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Try, ast.Lambda))][1:]


def test_ruff():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
