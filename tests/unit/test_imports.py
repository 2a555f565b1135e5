"""Imports go one way, and what is private to a folder is used in it only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import belayer

pytestmark = pytest.mark.unit

ROOT = Path(belayer.__file__).parent

# each may import what stands before it, and nothing else of ours
_ORDER = """
    _version __version__ versions errors protobuf seeds files config events _shielded _ending _awaited _function_errors
    faults ownership journal _retention_news groups trajectory run_directory _announcements checkpoint sandbox engine
    recovery rollout member observe run verify gateway integrations training cli
"""
RANK = {part: number for number, part in enumerate(_ORDER.split())}
# these reach what is above them by hooks only; and a checker that shares code with what it checks proves nothing
NEVER = {
    "faults": {"engine", "sandbox", "recovery", "run"},
    "observe": {"engine", "sandbox", "run", "member", "rollout"},
    "verify.checker": {"recovery"},
    "verify.witness": {"recovery"},
}
# one folder's own tools that its nearest neighbours use too; no others may
BORROWED = {
    ("gateway.http.control", "gateway.dialects._fields.Fields"),
    ("gateway.http.info", "gateway.dialects._fields.Fields"),
    ("gateway.http.info", "gateway.dialects._fields.is_ids"),
    ("gateway.http.session_routes", "gateway.dialects._fields.Fields"),
    ("gateway.sessions.book", "gateway.dialects._fields.finite"),
    ("gateway.upstream.own", "engine._model_folder.inspect"),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules of ours that a module imports, anywhere in it but for types; without the leading `belayer.`."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("belayer.") for a in node.names if a.name.startswith("belayer."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "belayer":
            inside = (node.module or "").removeprefix("belayer").removeprefix(".")
            for each in node.names:
                yield f"{inside}.{each.name}" if inside else each.name


def test_imports_go_one_way():
    wrong = []
    for name, tree in modules():
        part = name.split(".")[0]
        if part in ("__init__", ""):
            continue  # the public names, from anywhere
        assert part in RANK, f"{part} has no place in the order of imports yet"
        for other in {each.split(".")[0] for each in imports(tree)} - {part}:
            if other in RANK and RANK[other] > RANK[part]:
                wrong.append(f"{name} imports {other}")
        for who, never in NEVER.items():
            if name == who or name.startswith(f"{who}."):
                wrong += [f"{name} imports {other}" for other in never & {each.split(".")[0] for each in imports(tree)}]
    assert wrong == []


def test_what_is_private_to_a_folder_is_used_in_it():
    wrong = []
    for name, tree in modules():
        for other in imports(tree):
            folder: list[str] = []
            for piece in other.split("."):
                private = piece.startswith("_") and not piece.startswith("__")
                if private and folder and name.split(".")[: len(folder)] != folder:
                    wrong.append((name, other))
                    break
                folder.append(piece)
    assert set(wrong) - BORROWED == set()
