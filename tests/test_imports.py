"""Who may import whom, read off the source; and what importing the trainer loads."""

import ast
import pathlib
import subprocess
import sys

import pytest

import mutualrl

ROOT = pathlib.Path(mutualrl.__file__).parent
COMPILERS = {"jit", "pmap", "pjit", "shard_map"}
DEVICE = {"jax", "jaxlib", "flax", "optax", "orbax"}


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(p): p for p in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports(name, lazy=True):
    """Full names of the modules that a module imports; without `lazy`, only those that loading it imports."""
    found = set()

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(a.name for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
                base = ".".join(package[: len(package) - child.level + 1]) if child.level else ""
                base = ".".join(filter(None, (base, child.module)))
                for a in child.names:
                    full = f"{base}.{a.name}"
                    found.add(full if full in FILES else base)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                walk(child)

    walk(TREES[name])
    return found


def reached(name, lazy=True):
    """Everything a module imports, directly or through other modules and their packages."""
    todo, seen = [name], set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        if module in FILES:
            todo += imports(module, lazy)
            todo += [module.rpartition(".")[0]] * ("." in module)
    return seen


def tops(modules):
    return {m.split(".")[0] for m in modules}


def under(*names):
    """Modules of the package that are one of the names, or inside one."""
    full = [f"mutualrl.{n}" for n in names]
    found = [m for m in FILES if any(m == f or m.startswith(f + ".") for f in full)]
    assert found, names
    return found


HOST = under("labels", "transfer", "rewards", "data", "types", "advantages", "batches", "config", "tokenizers",
             "analysis", "metrics")  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_host_side_modules_never_reach_jax(name):
    assert tops(reached(name)) & DEVICE == set()


@pytest.mark.parametrize("name", FILES)
def test_third_parties(name):
    direct = tops(imports(name))
    assert not direct & {"torch", "torchvision"}
    assert "transformers" not in direct or name in under("tokenizers")
    assert not tops(imports(name, lazy=False)) & {"tensorflow", "tensorflow_datasets", "clu", "torch", "transformers"}


def test_models_do_not_know_how_they_are_placed():
    for name in under("models"):
        assert not reached(name) & set(under("meshes", "sharding", "policy", "sampling", "losses", "config"))


def test_policies_do_not_know_the_loop():
    loop = set(under("train", "cohort", "evaluate", "transfer", "labels", "report"))
    for name in under(
        "policy", "sampling", "losses", "meshes", "sharding", "models", "tokenizers", "batches", "advantages"
    ):
        assert not reached(name) & loop, name


def test_regimes_and_labels_are_independent():
    for name in under("transfer"):
        assert not reached(name) & set(under("labels"))
    for name in under("labels"):
        assert not reached(name) & set(under("transfer"))


def test_only_a_policy_compiles():
    """`jax.jit` (and its like) is called in policy.py; for the warm-up in warmup.py; and to make random parameters."""
    for name, tree in TREES.items():
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in COMPILERS]
        allowed = name in ("mutualrl.policy", "mutualrl.warmup")
        if name == "mutualrl.models.decoder":
            (function,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "init_params"]
            allowed = all(use in list(ast.walk(function)) for use in uses)
        assert allowed or not uses, name
        taken = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        assert not taken & COMPILERS, name


def test_no_import_cycles():
    """Modules import downwards only (imports inside functions aside)."""
    state = {}

    def visit(name, chain):
        if state.get(name) == "done" or name not in FILES:
            return
        assert state.get(name) != "open", " > ".join((*chain, name))
        state[name] = "open"
        for other in sorted(imports(name, lazy=False)):
            visit(other, (*chain, name))
        state[name] = "done"

    for name in FILES:
        visit(name, ())


def test_the_trainer_loads_without_tensorflow_and_torch():
    code = "import sys, mutualrl.train; print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(out))
    assert "jax" in loaded
    assert not loaded & {"tensorflow", "tensorflow_datasets", "torch", "clu", "reasoning_gym", "math_verify"}
