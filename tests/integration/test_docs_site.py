"""The documentation: it builds without warnings, needs nobody else's server, and leaves nothing out."""

from __future__ import annotations

import ast
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.docs_kit import PAGES, ROOT

pytestmark = pytest.mark.integration
BUILD = ROOT / "scripts/build_docs.sh"


def _venv() -> Path:
    done = subprocess.run([BUILD, "--where"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (_venv() / ".complete").exists():
        pytest.skip("MkDocs is not installed: `make docs` does that")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run([BUILD, place], capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARNING" not in said, said
    return place


class _Loads(HTMLParser):
    """Addresses that a browser fetches by itself; a link that somebody may click is none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed", "track", "object"):
            self.found += [given[name] or "" for name in ("src", "srcset", "data", "poster") if name in given]
        if tag == "link" and (given.get("rel") or "") not in ("canonical", "prev", "next", "edit"):
            self.found.append(given.get("href") or "")
        if style := given.get("style"):
            self.found += re.findall(r"url\(([^)]*)\)", style)


def test_a_browser_loads_nothing_from_elsewhere(site: Path):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        away = [url for url in loads.found if re.match(r"\s*[\"']?(https?:)?//", url)]
        assert not away, f"{page.relative_to(site)} loads {away}"
    for sheet in site.rglob("*.css"):
        away = re.findall(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)\"']*", sheet.read_text())
        assert not away, f"{sheet.relative_to(site)} loads {away}"
    for picture in site.rglob("pictures/*.svg"):
        assert not re.search(r"(?:href|src)=[\"'](?:https?:)?//|@import", picture.read_text()), picture


def test_the_site_has_what_it_promises(site: Path):
    text = (site / "reference/cli.html").read_text()
    assert "belayer checkpoint export" in text and "--reference" in text
    settings = (site / "reference/settings.html").read_text()
    assert "engine.adopt_sealed_blocks" in settings and "sandbox.allow_level" in settings
    python = (site / "reference/python.html").read_text()
    assert "belayer.run.Run.rollouts" in python and "weights_versions" in python
    assert "One machine, and nothing has run" in (site / "limits.html").read_text()
    decisions = (site / "decisions/index.html").read_text()
    assert len(list((ROOT / "docs/decisions").glob("[0-9]*.md"))) == decisions.count('<li><a href="0')
    assert (site / "pictures/recovery.svg").is_file() and (site / "search/search_index.json").is_file()


def test_every_page_is_in_the_navigation():
    """MkDocs checks it too; this says so where MkDocs is not installed."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in PAGES[1:]:
        assert f" {page.relative_to(ROOT / 'docs')}\n" in navigation + "\n", f"{page.name} is in no menu of mkdocs.yml"


def test_every_error_has_an_entry():
    """Every public error, also those that modules have of their own."""
    parents: dict[str, set[str]] = {}
    for file in (ROOT / "src/belayer").rglob("*.py"):
        if any(part.startswith("_") and part != "__init__.py" for part in file.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                parents.setdefault(node.name, set()).update(b.id for b in node.bases if isinstance(b, ast.Name))
    errors = {"BelayerError"}
    while more := {name for name, above in parents.items() if above & errors} - errors:
        errors |= more
    public = {name for name in errors if not name.startswith("_")}
    assert len(public) >= 28
    page = (ROOT / "docs/troubleshooting.md").read_text()
    missing = sorted(name for name in public if f"`{name}`" not in page)
    assert not missing, f"docs/troubleshooting.md does not say what to do about {missing}"


def test_pictures_are_for_light_and_dark_and_for_those_who_do_not_see_them():
    shown = set(re.findall(r"!\[[^\]]{20,}\]\((pictures/[^)]+)\)", (ROOT / "docs/concepts.md").read_text()))
    pictures = sorted((ROOT / "docs/pictures").glob("*.svg"))
    assert {f"pictures/{picture.name}" for picture in pictures} == shown
    for picture in pictures:
        text = picture.read_text()
        assert "prefers-color-scheme: dark" in text and "<title" in text and "<desc" in text
