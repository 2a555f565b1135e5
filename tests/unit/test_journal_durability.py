"""What a journal promises beyond its own bytes: names on the disk, one writer, versions, retention."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from belayer.errors import JournalCorrupt, RunInUse, RunVersionMismatch
from belayer.journal import Compacted, Gone, Journal, read_histories, result_gone, scan
from belayer.journal import records as r
from belayer.journal.framing import frame
from belayer.journal.segments import SegmentWriter, segment_files
from belayer.run_directory import RunDirectory
from belayer.verify import verify_records

pytestmark = pytest.mark.unit

HOST = """
import sys, pathlib
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.run_directory import RunDirectory
run = pathlib.Path(sys.argv[1])
directory = RunDirectory.open(run, about={})
journal = Journal(run / "journal", durability="host", segment_bytes=100)
for number in range(4):
    journal.record(r.RolloutStarted(rollout=f"r{number}", group="g", task="x" * 50, seed=1))
    pathlib.Path(sys.argv[1], f"recorded{number}").touch()
"""


def finished(rollout: str, *, acknowledged: bool, size: int = 2000) -> list[r.AnyRecord]:
    made: list[r.AnyRecord] = [
        r.RolloutStarted(rollout=rollout, group="g", task=None, seed=1),
        r.TokensAppended(rollout=rollout, call=0, source="observation", ids=[1], asked="observe"),
        r.ActionIntended(rollout=rollout, call=1, k=1, g=1, asked="one"),
        r.ActionCompleted(rollout=rollout, call=1, k=1, g=1, observed="o", result={"value": rollout * size}),
        r.RolloutFinished(rollout=rollout, reward=1.0),
    ]
    return [*made, r.Acknowledged(rollout=rollout)] if acknowledged else made


# -- durability = host --------------------------------------------------------------------------------
def must_be_synced(run: Path) -> set[str]:
    """Every folder in which a new name appeared, from the first that was there before."""
    return {str(run.parents[1]), str(run.parent), str(run), str(run / "journal")}


def test_every_new_name_is_synced(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "one"
    synced: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def spy(fd: int, real=real) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        monkeypatch.setattr(os, name, spy)
    directory = RunDirectory.open(run, about={})
    journal = Journal(run / "journal", durability="host", segment_bytes=100)
    assert must_be_synced(run) <= set(synced)
    for number in range(3):
        synced.clear()
        journal.record(r.RolloutStarted(rollout=f"r{number}", group="g", task="x" * 90, seed=1))
        segment = segment_files(run / "journal")[-1]
        assert synced[-1] == str(segment), "the record is not on the disk"
        assert number == 0 or str(run / "journal") in synced, "the segment's name is not on the disk"
    journal.close()
    directory.close()
    synced.clear()
    relaxed = Journal(tmp_path / "process")
    relaxed.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    assert not synced, "durability = process promises nothing that would need this"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_is_asked_to_sync_before_a_record_counts(tmp_path):
    run = tmp_path / "runs" / "one"
    log = tmp_path / "calls"
    calls = "trace=fsync,fdatasync,openat,mkdir,write,pwrite64"
    done = subprocess.run(
        ["strace", "-y", "-s", "0", "-e", calls, "-o", str(log), sys.executable, "-c", HOST, str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    dirty, synced, recorded = set[str](), set[str](), 0
    for line in log.read_text().splitlines():
        call, _, rest = line.partition("(")
        path = rest.partition("<")[2].partition(">")[0]
        if call in ("fsync", "fdatasync"):
            synced.add(path)
            dirty.discard(path)
        elif call in ("write", "pwrite64") and path.endswith(".seg"):
            dirty.add(path)
        elif call == "openat" and f"/recorded{recorded}" in line:
            assert not dirty, f"record {recorded} counts and is not on the disk"
            assert must_be_synced(run) <= synced
            recorded += 1
    assert recorded == 4


# -- one writer, versions ------------------------------------------------------------------------------
def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    first = Journal(tmp_path)
    first.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    with pytest.raises(RunInUse, match="has a writer"):
        Journal(tmp_path)
    assert len(list(scan(tmp_path))) == 1  # reading is free
    first.close()
    Journal(tmp_path).close()


def append_raw(folder: Path, fields: dict) -> None:
    (path,) = segment_files(folder)
    count = len(list(scan(folder)))
    with open(path, "ab") as file:
        file.write(frame(count, msgspec.msgpack.encode(fields)))


def test_a_kind_of_record_from_the_future_is_a_version_mismatch_and_a_new_field_is_not(tmp_path):
    journal = Journal(tmp_path)
    journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    journal.close()
    append_raw(tmp_path, {"type": "RolloutFinished", "rollout": "a", "reward": 1.0, "mood": "good"})
    assert read_histories(tmp_path)["a"].reward == 1.0
    append_raw(tmp_path, {"type": "RolloutPainted", "rollout": "a", "colour": "red"})
    for read in (lambda: list(scan(tmp_path)), lambda: Journal(tmp_path)):
        with pytest.raises(RunVersionMismatch, match="RolloutPainted, which this Belayer does not know"):
            read()
    with pytest.raises(JournalCorrupt):  # a known kind that is not what it should be is damage
        append = tmp_path / "other"
        SegmentWriter(append).close()
        append_raw(append, {"type": "RolloutFinished", "rollout": "a", "reward": "high"})
        list(scan(append))


def test_a_journal_of_format_2_is_read_and_continued(tmp_path):
    journal = Journal(tmp_path, segment_bytes=100)
    for record in finished("a", acknowledged=False):
        journal.record(record)
    journal.close()
    for path in segment_files(tmp_path):
        content = bytearray(path.read_bytes())
        content[4:6] = (2).to_bytes(2, "little")
        path.write_bytes(content)
    again = Journal(tmp_path, segment_bytes=100)
    again.record(r.Acknowledged(rollout="a"))
    again.close()
    assert list(scan(tmp_path)) == finished("a", acknowledged=True)


# -- retention -----------------------------------------------------------------------------------------
def write_all(folder: Path, **options) -> list[Compacted]:
    passes: list[Compacted] = []
    journal = Journal(folder, compacted=passes.append, **options)
    for rollout in ("a", "b", "c"):
        for record in finished(rollout, acknowledged=rollout != "c"):
            journal.record(record)
    journal.close()
    return passes


@pytest.mark.parametrize("retention", ["archive", "drop"])
def test_only_what_was_acknowledged_goes_and_the_rest_is_as_it_was(tmp_path, retention):
    before = [record for name in "abc" for record in finished(name, acknowledged=name != "c")]
    write_all(tmp_path / "keep", retention="keep")
    passes = write_all(tmp_path / "less", retention=retention, segment_bytes=3000)
    assert not any(each.error for each in passes) and sum(each.results for each in passes) == 2
    found = list(scan(tmp_path / "less"))
    gone = {record.rollout: result_gone(record.result) for record in found if isinstance(record, r.ActionCompleted)}
    size = len(msgspec.msgpack.encode({"value": "a" * 2000}))
    assert gone == {"a": Gone(size, retention == "archive"), "b": Gone(size, retention == "archive"), "c": None}
    assert [type(record) for record in found] == [type(record) for record in before]
    same = [now == then for now, then in zip(found, before, strict=True)]
    assert same.count(False) == 2
    assert verify_records(found).consistent

    def bytes_of(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    assert bytes_of(tmp_path / "less") < bytes_of(tmp_path / "keep") - 3000
    if retention == "archive":
        assert list(scan(tmp_path / "less", archived=True)) == before


def test_what_is_acknowledged_later_joins_the_archive(tmp_path):
    write_all(tmp_path, retention="archive")
    journal = Journal(tmp_path, retention="archive")
    journal.record(r.Acknowledged(rollout="c"))
    journal.close()
    expected = [record for name in "abc" for record in finished(name, acknowledged=True)]
    assert list(scan(tmp_path, archived=True)) == expected
    assert all(result_gone(record.result) for record in scan(tmp_path) if isinstance(record, r.ActionCompleted))
    before = {path: path.stat().st_ino for path in segment_files(tmp_path)}
    again = Journal(tmp_path, retention="archive")
    assert all(call.result is None for call in again.history("c").calls)
    again.close()
    assert {path: path.stat().st_ino for path in segment_files(tmp_path)} == before, "nothing was left to do"
    assert list(scan(tmp_path, archived=True)) == expected


def test_a_full_segment_is_compacted_while_the_run_goes_on(tmp_path):
    passes: list[Compacted] = []
    journal = Journal(tmp_path, retention="drop", segment_bytes=5000, compacted=passes.append)
    for number in range(12):
        for record in finished(f"r{number}", acknowledged=True, size=500):
            journal.record(record)
            if journal._compaction is not None:
                journal._compaction.join()
    assert sum(each.results for each in passes) >= 8, "nothing was taken out before the end"
    journal.close()
    assert sum(each.results for each in passes) == 12


def test_every_flipped_byte_of_an_archive_is_loud_and_the_journal_does_not_need_it(tmp_path):
    write_all(tmp_path, retention="archive", segment_bytes=1 << 20)
    expected, plain = list(scan(tmp_path, archived=True)), list(scan(tmp_path))
    (path,) = tmp_path.glob("*.arc")
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            assert list(scan(tmp_path, archived=True)) == expected
            assert position in range(8, 16) or position in range(28, 32)  # for people, and reserved
        except JournalCorrupt as error:
            assert "archive" in error.what
        assert position % 20 or list(scan(tmp_path)) == plain
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(JournalCorrupt, match="archive"):
            list(scan(tmp_path, archived=True))
    path.unlink()
    with pytest.raises(JournalCorrupt, match="is gone"):
        list(scan(tmp_path, archived=True))
    assert list(scan(tmp_path)) == plain


def test_a_failed_pass_is_told_and_leaves_the_journal_as_it_was(tmp_path):
    write_all(tmp_path, retention="keep")
    before = list(scan(tmp_path))
    passes: list[Compacted] = []
    journal = Journal(tmp_path, retention="drop", compacted=passes.append)
    (path,) = segment_files(tmp_path)
    (tmp_path / f"{path.name}.tmp").mkdir()  # in the way of what is to replace it
    journal.close()
    assert "Is a directory" in passes[0].error and list(scan(tmp_path)) == before
