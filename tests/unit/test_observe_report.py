"""The report and the trace, drawn from a synthetic run that looks like a real one, and from odd ones."""

from __future__ import annotations

import csv
import io
import json
import random
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belayer import events as ev
from belayer.events import Event
from belayer.observe import MetricsLog, Summary, read_summary, write_report, write_timeline

pytestmark = pytest.mark.unit

WORKER_PHASES = {
    "fence_s": 0.004, "check_s": 0.001, "gate_s": 0.002, "map_s": 0.0004, "activate_s": 0.003, "prefill_s": 0.031,
    "first_token_s": 0.018,
}  # fmt: skip
COLD_PHASES = {"fence_s": 0.004, "import_s": 5.4, "engine_s": 0.9, "warm_up_s": 0.6, "prefill_s": 0.03}
RESTORE_PHASES = {"detect_to_start_s": 0.001, "restore_s": 0.085, "replay_s": 0.02}


def synthetic_run(*, faults: bool, steps: int = 40, width: int = 32, seed: int = 7) -> list[Event]:
    """Events as a run of `steps` steps emits them: the same rewards with and without faults, other times."""
    rewards = random.Random(seed)
    noise = random.Random(seed + (1 if faults else 2))
    out: list[Event] = []
    now = 1_760_000_000.0

    def emit(kind: str, at: float, subject: str = "", **data: object) -> None:
        out.append(Event(kind=kind, subject=subject, at=at, data=data))

    def recovered(at: float, what: str, how: str, subject: str, phases: dict[str, float], fault: str) -> None:
        taken = {name: seconds * noise.uniform(0.6, 1.9) for name, seconds in phases.items()}
        total = sum(taken.values()) * 1.03
        emit(ev.RECOVERED, at + total, subject, what=what, how=how, fault=fault, phases=taken, total_s=total)

    versions = {"vllm": "0.32.0", "torch": "2.13.0", "criu": "4.2.1"}
    emit(ev.RUN_STARTED, now, seed=seed, resumed=False, steps=steps, inject=faults, versions=versions)
    emit(ev.WORKER_STATE, now + 7.5, "worker", generation=1, pid=4001, state="serving")
    emit(ev.SHADOW_STATE, now + 1, "shadow", generation=2, pid=4002, state="starting")
    emit(ev.SHADOW_STATE, now + 16, "shadow", generation=2, pid=4002, state="ready")
    worker_at = {steps * n // 7: n for n in range(1, 7)} if faults else {}
    now += 8
    generation = 1
    for step in range(steps):
        begun = now
        hit = set(noise.sample(range(width), noise.choice([0, 0, 1, 1]))) if faults else set()
        longest = 0.0
        body: list[Event] = []
        out, kept = body, out
        for number in range(width):
            name = f"s{step:03d}-g{number // 4:02d}-{number % 4}"
            at = begun + noise.uniform(0, 0.4)
            start = at
            emit(ev.ROLLOUT_STARTED, at, name, group=number // 4, attempt=1, step=step)
            for turn in range(3):
                took, tokens = noise.uniform(0.5, 1.2), noise.randint(12, 40)
                emit(ev.GENERATE, at + took, name, turn=turn, tokens=tokens, start=at, wall_s=took)
                at += took
                ran = noise.uniform(0.01, 0.08)
                emit(ev.EXEC, at + ran, name, action=turn, exit_code=0, start=at, wall_s=ran)
                at += ran
                cost = noise.uniform(0.07, 0.22)
                waited = cost * noise.uniform(0.1, 0.5) if noise.random() < 0.06 else 0.0
                extra = {"level": "full", "start": at, "wall_s": cost, "frozen_s": cost * 0.4, "exposed_s": waited}
                emit(ev.CHECKPOINT, at + cost, name, action=turn, id=f"c{turn}", **extra)
                at += waited
                if number in hit and turn == 1:
                    kind = noise.choice(["sandbox.kill", "sandbox.kill", "sandbox.damage"])
                    emit(ev.FAULT_INJECTED, at, name, fault=kind, target=name)
                    emit(ev.FAULT_DETECTED, at + 0.004, name, fault=kind, how="pidfd", detect_s=0.004)
                    recovered(
                        at,
                        "sandbox",
                        "full restore" if noise.random() < 0.85 else "new container",
                        name,
                        RESTORE_PHASES,
                        kind,
                    )
                    at += 0.12
            emit(ev.ROLLOUT_FINISHED, at, name, reward=0.5, turns=3, tokens=80, wall_s=at - start, attempt=1)
            longest = max(longest, at)
        if step in worker_at:
            at, nth = begun + noise.uniform(0.8, 2.0), worker_at[step]
            kind = "worker.sigstop" if nth % 3 == 0 else "worker.sigkill"
            cold = nth == 4
            generation += 1
            emit(ev.FAULT_INJECTED, at, "worker", fault=kind, target="4001")
            recovered(at, "worker", "cold start" if cold else "promotion", "worker",
                      COLD_PHASES if cold else WORKER_PHASES, kind)  # fmt: skip
            emit(ev.SHADOW_STATE, at + 0.03, "shadow", generation=generation + 1, pid=1, state="starting")
            emit(ev.SHADOW_STATE, at + 9.0, "shadow", generation=generation + 1, pid=1, state="ready")
            emit(ev.WORKER_STATE, at + 0.06, "worker", generation=generation, pid=2, state="serving")
            longest += 7.0 if cold else 0.1
        out = kept
        out.extend(sorted(body, key=lambda event: event.at))
        now = longest + 0.7
        for number in range(width):
            emit(ev.ROLLOUT_DELIVERED, now, f"s{step:03d}-g{number // 4:02d}-{number % 4}", attempt=1, step=step)
        reward = min(0.97, 0.12 + 0.8 * (step / steps) ** 0.7 + rewards.uniform(-0.06, 0.06))
        emit(ev.TRAIN_STEP, now, step=step, reward_mean=reward, loss=0.1, rollouts=width, wall_s=now - begun)
    emit(ev.RUN_FINISHED, now, wall_s=now - 1_760_000_000.0, ok=True)
    return out


def record(folder: Path, events: list[Event], *, compared: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if compared:
        found = {"rollouts_compared": 1280, "rollouts_identical": 1280, "tokens_compared": 99_412, "tokens_changed": 0}
        events = [*events, Event(kind=ev.RUN_COMPARED, at=events[-1].at + 300, data={"reference": "plain", **found})]
    with MetricsLog(folder / "metrics.jsonl") as log:
        for event in events:
            log(event)
    Summary.from_metrics(folder / "metrics.jsonl").write(folder / "summary.json")
    return folder


class _Page(HTMLParser):
    """Collects tags, balanced or not, and what would be fetched from elsewhere."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.foreign: list[str] = []
        self.data = ""
        self.text = ""
        self.downloads: dict[str, str] = {}
        self._in_data = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        about = dict(attrs)
        self._in_data = about.get("id") == "belayer-data"
        if tag == "a" and (about.get("href") or "").startswith("data:text/csv;charset=utf-8,"):
            self.downloads[str(about["download"])] = unquote(str(about.pop("href")).split(",", 1)[1])
        if tag == "link" and about.get("href") == "data:,":
            del about["href"]
        self.foreign += [f"{n}={value}" for n, value in about.items() if n in ("src", "href", "onload", "onerror")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unbalanced </{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data if self._in_data else ""
        else:
            self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("runs")
    return (
        record(base / "faults", synthetic_run(faults=True), compared=True),
        record(base / "plain", synthetic_run(faults=False)),
    )


def test_report_of_a_whole_run_is_one_page_with_every_figure(runs: tuple[Path, Path]) -> None:
    run, reference = runs
    content = write_report(run, reference).read_text()
    page = _Page(content)
    assert page.open == []
    assert page.foreign == []
    assert "http" not in content.replace("http://www.w3.org", "")
    assert "url(" not in content and "@import" not in content
    assert page.tags.count("svg") == 5
    assert "Not drawn" not in page.text
    assert "Nothing was lost" in page.text
    assert "1\u202f280 / 1\u202f280" in page.text
    assert "exactly equal in all 40 steps" in page.text
    assert len(content) < 2_000_000
    for start in (at for at in range(len(content)) if content.startswith("<svg", at)):
        ElementTree.fromstring(content[start : content.index("</svg>", start) + 6])


def test_report_embeds_its_data(runs: tuple[Path, Path]) -> None:
    run, reference = runs
    data = json.loads(_Page(write_report(run, reference).read_text()).data)
    summary = read_summary(run / "summary.json")
    assert data["summary"] == msgspec.to_builtins(summary)
    assert len(data["steps"]) == 40 and len(data["reference"]["steps"]) == 40
    assert len(data["recoveries"]) == len(summary.recoveries)
    assert len(data["checkpoints"]) == summary.checkpoints


def test_every_figure_has_its_data_and_an_answer_that_the_data_gives(runs: tuple[Path, Path]) -> None:
    run, reference = runs
    page = _Page(write_report(run, reference).read_text())
    tables = {name: list(csv.DictReader(io.StringIO(text))) for name, text in page.downloads.items()}
    assert set(tables) == {"reward.csv", "timeline.csv", "phases.csv", "checkpoints.csv", "lanes.csv"}
    summary = read_summary(run / "summary.json")
    assert len(tables["reward.csv"]) == 40
    assert all(row["reward_mean"] == row["reward_mean_without_faults"] for row in tables["reward.csv"])
    faults = [row for row in tables["timeline.csv"] if row["injected"] == "True"]
    assert len(faults) == summary.faults_injected
    assert f"{len(faults)} faults injected" in page.text
    longest = max(float(row["recovery_total_s"]) for row in tables["timeline.csv"] if row["recovery_total_s"])
    assert longest == pytest.approx(max(one.total_s for one in summary.recoveries), abs=1e-5)
    waited = sum(float(row["exposed_s"]) for row in tables["checkpoints.csv"])
    assert waited == pytest.approx(summary.checkpoint_exposed_s, abs=1e-3)
    assert f"{summary.hidden_checkpoint_share:.1%} were hidden" in page.text
    assert len(tables["phases.csv"]) == sum(len(one.phases) for one in summary.recoveries)


def test_report_without_reference_says_so(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = runs
    text = _Page(write_report(run).read_text()).text
    assert "made without a reference run" in text
    missing = _Page(write_report(run, tmp_path / "nowhere").read_text()).text
    assert "cannot be read" in missing and "nowhere" in missing
    assert "No such file" in missing


def test_report_of_an_empty_run_draws_nothing_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    page = _Page(write_report(tmp_path).read_text())
    assert "svg" not in page.tags
    assert page.text.count("Not drawn: ") == 6
    assert "no fault" in page.text and "no checkpoint" in page.text
    assert "has not finished" in page.text


def test_report_needs_metrics(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_report_says_when_the_promise_was_broken(tmp_path: Path) -> None:
    events = synthetic_run(faults=True, steps=3, width=4)
    gone = next(event for event in events if event.kind == ev.ROLLOUT_DELIVERED)
    text = _Page(write_report(record(tmp_path, [one for one in events if one is not gone])).read_text()).text
    assert "did not keep its promise" in text
    assert "11 of 12 rollouts delivered, 1 lost" in text


def test_report_mentions_torn_lines_and_a_bad_summary(tmp_path: Path) -> None:
    record(tmp_path, synthetic_run(faults=True, steps=2, width=4))
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"kind":"train.step","at":17')
    (tmp_path / "summary.json").write_text('{"seed": "seven"}')
    text = _Page(write_report(tmp_path).read_text()).text
    assert "1 line(s) of metrics.jsonl were torn" in text
    assert "summary.json cannot be read" in text


HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u2028\ud800\x00]]>"


def test_report_escapes_every_text(tmp_path: Path) -> None:
    run = tmp_path / "run<b>&"
    events = [
        Event(kind=ev.RUN_STARTED, at=0, data={"seed": 1, "steps": 1, "versions": {HOSTILE: HOSTILE}}),
        Event(kind=ev.SHADOW_STATE, subject=HOSTILE, at=0.5, data={"state": HOSTILE, "reason": HOSTILE}),
        Event(kind=ev.ROLLOUT_STARTED, subject=HOSTILE, at=1),
        Event(kind=ev.EXEC, subject=HOSTILE, at=3, data={"action": HOSTILE, "exit_code": HOSTILE, "wall_s": 1.0}),
        Event(kind=ev.CHECKPOINT, subject=HOSTILE, at=3, data={"level": HOSTILE, "wall_s": 1.0, "exposed_s": 0.5}),
        Event(kind=ev.FAULT_INJECTED, subject=HOSTILE, at=3, data={"fault": HOSTILE}),
        Event(
            kind=ev.RECOVERED,
            subject=HOSTILE,
            at=4,
            data={"what": HOSTILE, "how": HOSTILE, "phases": {HOSTILE: 0.5}, "total_s": 0.6},
        ),
        Event(kind=ev.TRAIN_STEP, at=5, data={"step": 0, "reward_mean": 0.5, "wall_s": 5.0}),
    ]
    # Without the surrogate, which JSON cannot hold, so that the rest goes through unchanged.
    clean = msgspec.json.decode(json.dumps(msgspec.to_builtins(events)).replace("\\ud800", ""), type=list[Event])
    content = write_report(record(run, clean)).read_text()
    page = _Page(content)
    assert page.foreign == []
    assert page.tags.count("script") == 3 and "img" not in page.tags and "b" not in page.tags
    assert "alert(1)" in page.text
    assert "\x00" not in content
    record(run, events)
    assert _Page(write_report(run).read_text()).tags.count("script") == 3


_scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
_data = st.dictionaries(
    st.sampled_from(["step", "reward_mean", "wall_s", "start", "phases", "total_s", "what", "how", "fault", "tokens",
                     "exposed_s", "state", "generation", "steps", "seed", "versions", "count", "resumed"]),
    _scalar | st.lists(_scalar, max_size=2) | st.dictionaries(st.text(max_size=4), _scalar, max_size=3),
    max_size=6,
)  # fmt: skip
_KINDS = [value for name, value in vars(ev).items() if name.isupper() and isinstance(value, str)]
odd_events = st.builds(
    Event,
    kind=st.sampled_from(_KINDS) | st.text(max_size=5),
    subject=st.sampled_from(["worker", "r1", "r2", ""]) | st.text(max_size=5),
    at=st.floats(0, 2e9) | st.floats(allow_nan=False),
    data=_data,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(odd_events, max_size=25))
def test_no_event_can_break_summary_report_or_trace(tmp_path: Path, events: list[Event]) -> None:
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / name).unlink(missing_ok=True)
    record(tmp_path, events)
    read_summary(tmp_path / "summary.json")
    page = _Page(write_report(tmp_path, tmp_path).read_text())
    assert page.open == []
    json.loads(page.data)
    json.loads(write_timeline(tmp_path).read_text())


def test_trace_slices_nest(runs: tuple[Path, Path]) -> None:
    run, _ = runs
    trace = json.loads(write_timeline(run).read_text())["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert len(slices) > 1280 * 10
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in slices:
        assert one["dur"] >= 0 and one["ts"] >= 0
        lanes.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for intervals in lanes.values():
        stack: list[tuple[int, int]] = []
        for start, end in sorted(intervals, key=lambda pair: (pair[0], -pair[1])):
            while stack and stack[-1][1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1][1], "two slices of a lane overlap without nesting"
            stack.append((start, end))
    named = {(event["pid"], event["tid"]) for event in trace if event["name"] == "thread_name"}
    assert set(lanes) <= named
    faults = [one for one in slices if one["cat"] == "fault" and one["args"]["injected"]]
    assert len(faults) == read_summary(run / "summary.json").faults_injected


def test_a_resumed_run_has_no_gap_in_run_time(tmp_path: Path) -> None:
    first = synthetic_run(faults=True, steps=2, width=4)[:-1]
    pause = 5000.0
    shift = first[-1].at + pause
    second = [
        Event(kind=ev.RUN_STARTED, at=shift, data={"seed": 7, "resumed": True, "steps": 3}),
        Event(kind=ev.TRAIN_STEP, at=shift + 4, data={"step": 2, "reward_mean": 0.9, "wall_s": 4.0}),
        Event(kind=ev.RUN_FINISHED, at=shift + 4, data={"ok": True}),
    ]
    run = record(tmp_path, first + second)
    summary = read_summary(run / "summary.json")
    assert summary.sessions == 2 and summary.steps == 3 and summary.reward_last == 0.9
    assert summary.wall_s == pytest.approx(max(event.at for event in first) - first[0].at + 4)
    page = _Page(write_report(run).read_text())
    assert "resumed 1 time(s)" in page.text
    assert json.loads(page.data)["steps"][-1]["end"] == pytest.approx(summary.wall_s)


def test_faults_are_matched_and_the_shadow_strip_ends_with_its_promotion(tmp_path: Path) -> None:
    events = [
        Event(kind=ev.RUN_STARTED, at=0),
        Event(kind=ev.SHADOW_STATE, subject="shadow", at=1, data={"generation": 2, "state": "ready"}),
        Event(kind=ev.FAULT_DETECTED, subject="r1", at=2, data={"fault": "sandbox", "how": "init died"}),
        Event(kind=ev.FAULT_INJECTED, subject="r1", at=2, data={"fault": "sandbox.damage"}),
        Event(kind=ev.RECOVERED, subject="r1", at=3, data={"what": "sandbox", "how": "full restore", "fault": "died"}),
        Event(kind=ev.FAULT_DETECTED, subject="r1", at=3, data={"fault": "checkpoint", "how": "refused"}),
        Event(kind=ev.FAULT_DETECTED, subject="worker", at=4, data={"fault": "worker.hang"}),
        Event(kind=ev.WORKER_STATE, subject="worker", at=5, data={"generation": 2, "state": "serving"}),
        Event(kind=ev.RECOVERED, subject="worker", at=5, data={"what": "worker", "how": "promotion", "total_s": 1.0}),
        Event(kind=ev.RUN_FINISHED, at=9, data={"ok": True}),
    ]
    data = json.loads(_Page(write_report(record(tmp_path, events)).read_text()).data)
    assert [(one["fault"], one["injected"]) for one in data["faults"]] == [
        ("sandbox.damage", True),
        ("worker.hang", False),
    ]
    assert [one["recovery"]["fault"] for one in data["recoveries"]] == ["sandbox.damage", None]
    assert [(one["x"], one["state"]) for one in data["shadow"]] == [(1, "ready"), (5, "promoted")]
