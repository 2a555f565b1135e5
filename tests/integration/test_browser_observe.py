"""The report, the timeline page and /metrics in a real browser: no error, everything drawn, no text upon other text."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser_kit import Page, browser, find_browser

from belayer import events as ev
from belayer.events import Event
from belayer.observe import MetricsLog, read_metrics, write_report, write_timeline

_websockets = importlib.util.find_spec("websockets") is not None
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.skipif(not _websockets, reason="the package websockets is not installed"),
]

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded_run.jsonl"

# pairs of texts in one drawing whose boxes overlap by more than a hair; texts outside of their drawing; empty drawings
FLAWS = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const name = svg.closest("section").id, frame = svg.getBoundingClientRect();
    if (frame.width < 200 || frame.height < 60) found.push(name + ": drawn " + frame.width + " x " + frame.height);
    const shapes = [...svg.querySelectorAll("rect,circle,line,path,polyline")].map(one => one.getBoundingClientRect());
    if (shapes.filter(box => box.width + box.height > 1).length < 5) found.push(name + ": nothing is drawn in it");
    const texts = [...svg.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()]);
    for (const [text, box] of texts)
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1)
        found.push(name + ": outside: " + text);
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length; j++) {
        const [a, b] = [texts[i][1], texts[j][1]];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) found.push(name + ": " + texts[i][0] + " | " + texts[j][0]);
      }
  }
  return found;
})()
"""
# share of a canvas that is painted, and how many colours are on it
PAINTED = """
(() => {
  const canvas = document.querySelector(".viewer canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let painted = 0;
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3]) { painted++; colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]); }
  return [canvas.width, canvas.height, painted / (data.length / 4), colours.size];
})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as tab:
        yield tab


def record(folder: Path, events: list[Event]) -> Path:
    folder.mkdir(parents=True)
    with MetricsLog(folder / "metrics.jsonl") as log:
        for event in events:
            log(event)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "recorded", read_metrics(RECORDED))


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (420, False)])
def test_the_report_of_a_run_with_faults(page: Page, recorded: Path, width: int, dark: bool) -> None:
    path = write_report(recorded, recorded)
    page.open(path.as_uri(), width=width, dark=dark)
    assert page.problems == []
    assert page.evaluate("document.querySelectorAll('section svg').length") == 5
    assert page.evaluate(FLAWS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page itself must not scroll sideways"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) == dark
    wide, high, share, colours = page.evaluate(PAINTED)
    assert wide > 250 and high > 200 and share > 0.02 and colours > 5
    assert page.evaluate("document.querySelectorAll('.answer').length") == 6
    assert page.evaluate(
        "fetch(document.querySelector('a[download=\"reward.csv\"]').href).then(answer => answer.text())"
    ).startswith("step,reward_mean,reward_mean_without_faults,faults\n0,")


def test_flaws_are_seen(page: Page, recorded: Path) -> None:
    page.open(write_report(recorded, recorded).as_uri())
    page.evaluate("document.querySelectorAll('#reward text')[1].setAttribute('y', 19)")
    page.evaluate("document.querySelectorAll('#reward text')[0].setAttribute('y', 19)")
    page.evaluate("document.querySelectorAll('#phases text')[0].setAttribute('x', -200)")
    flaws = page.evaluate(FLAWS)
    assert any(flaw.startswith("reward: ") and " | " in flaw for flaw in flaws)
    assert any(flaw.startswith("phases: outside: ") for flaw in flaws)
    page.evaluate("setTimeout(() => { throw new Error('on purpose') })")
    page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert any("on purpose" in problem for problem in page.problems)


def test_the_reports_of_odd_runs(page: Page, tmp_path: Path) -> None:
    calm = [e for e in read_metrics(RECORDED) if e.kind not in (ev.FAULT_INJECTED, ev.FAULT_DETECTED, ev.RECOVERED)]
    everything = read_metrics(RECORDED)
    failing = [*everything[:250], Event(kind=ev.ROLLOUT_FAILED, subject="s0001-0-0", at=everything[249].at + 1,
                                        data={"failure": "BudgetSpent", "reason": "spent"})]  # fmt: skip
    runs = {
        "empty": ([], 0, "has not finished"),
        "calm": (calm, 3, "with no fault injected"),
        "going": (everything[:300], 5, "has not finished"),
        "failing": (failing, 5, "did not keep its promise"),
    }
    for name, (events, charts, says) in runs.items():
        page.open(write_report(record(tmp_path / name, events)).as_uri())
        assert page.problems == [], name
        assert page.evaluate("document.querySelectorAll('section svg').length") == charts, name
        assert page.evaluate(FLAWS) == [], name
        assert says in page.evaluate("document.querySelector('.verdict').textContent"), name


def test_the_timeline_page_is_drawn_and_can_be_moved(page: Page, recorded: Path, tmp_path: Path) -> None:
    path = write_timeline(recorded, output=tmp_path / "timeline.html")
    page.open(path.as_uri())
    assert page.problems == []
    wide, high, share, colours = page.evaluate(PAINTED)
    assert wide > 900 and high > 300 and share > 0.02 and colours > 5
    assert int(page.evaluate("document.querySelector('.viewer').dataset.drawn")) > 5
    left, top = page.evaluate(
        "(() => { const box = document.querySelector('.viewer canvas').getBoundingClientRect();"
        " return [box.left, box.top]; })()"
    )
    # zoom in at a slice of the first step, then point at it: it says what it is
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=left + 700, y=top + 50, deltaX=0, deltaY=-600)
    told = []
    for x in range(200, 1000, 50):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + x, y=top + 50)
        told.append(page.evaluate("document.querySelector('.viewer .at').textContent"))
    assert any(re.match(r"step \d · ", text) for text in told), told
    page.call("Input.dispatchKeyEvent", type="keyDown", key="0")
    assert page.problems == []


def test_the_metrics_page(page: Page) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from belayer.observe.prometheus import MetricsServer, RunMetrics

    metrics = RunMetrics(run="recorded")
    for event in read_metrics(RECORDED):
        metrics(event)
    with MetricsServer(metrics) as server:
        page.open(server.url)
        text = page.evaluate("document.body.innerText")
    assert page.problems == []
    assert re.search(r"^belayer_rollouts_delivered_total 27\.0$", text, re.MULTILINE)
