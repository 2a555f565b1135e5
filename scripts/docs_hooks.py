"""What `mkdocs build` does beyond its own: pages that are made, and links that lead out of the documentation."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES_ELSEWHERE = {"README.md": "index.md", "README.md#limits": "limits.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in _made().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a file of the repository that is no page becomes its text: the site does not hold sources."""
    made = page.file.src_uri in ("index.md", "limits.md", "changelog.md")
    here = ROOT if made else (Path(config.docs_dir) / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        path = (here / target).resolve()
        up = "../" * page.file.src_uri.count("/")
        if path.is_relative_to(config.docs_dir):
            return f"[{text}]({path.relative_to(config.docs_dir)}{anchor})" if made else match[0]
        if not path.is_relative_to(ROOT):
            return match[0]
        name = str(path.relative_to(ROOT))
        if moved := PAGES_ELSEWHERE.get(name + anchor):
            return f"[{text}]({up}{moved})"
        if name in PAGES_ELSEWHERE:
            return f"[{text}]({up}{PAGES_ELSEWHERE[name]}{anchor})"
        return text

    return LINK.sub(replace, markdown)


def _made() -> dict[str, str]:
    """Commands and settings from the program; README and changes, which are pages too; the list of decisions."""
    done = subprocess.run(
        [ROOT / ".venv/bin/python", ROOT / "scripts/docs_reference.py"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"the reference cannot be made:\n{done.stderr}")
    readme = (ROOT / "README.md").read_text()
    limits = re.search(r"^## Limits\n.*?(?=^## )", readme, flags=re.DOTALL | re.MULTILINE)
    if limits is None:
        raise SystemExit("README.md has no section Limits")
    return json.loads(done.stdout) | {
        "index.md": readme.replace(limits[0], "").replace("](#limits)", "](README.md#limits)"),
        "limits.md": limits[0][1:],
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "decisions/index.md": _decisions(),
    }


def _decisions() -> str:
    lines = [
        "# Decisions",
        "",
        "Why things are as they are, one page each, in the order in which they were taken.",
        "",
    ]
    for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md")):
        title = path.read_text().split("\n", 1)[0].lstrip("# ")
        lines.append(f"- [{path.stem[:4]}]({path.name}) {re.sub(r'^[0-9]+[.:]? *', '', title)}")
    return "\n".join(lines) + "\n"
