"""The journal: whatever happens to its bytes, it yields a whole prefix or a loud error, never a wrong record."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.errors import JournalCorrupt, RunVersionMismatch, StorageFull
from belayer.journal import Journal, compare_runs, scan
from belayer.journal import records as r
from belayer.journal.framing import FRAME_HEADER, SEGMENT_HEADER
from belayer.journal.segments import SegmentWriter, segment_files

pytestmark = pytest.mark.unit


def some_records(count: int) -> list[r.AnyRecord]:
    made: list[r.AnyRecord] = [r.RolloutStarted(rollout="a", group="g", task={"n": 1}, seed=7)]
    for number in range(count - 1):
        made.append(r.TokensAppended(rollout="a", call=number, source="observation", ids=[number] * (number % 5 + 1)))
    return made


def written(folder, records, **kwargs):
    writer = SegmentWriter(folder, **kwargs)
    for record in records:
        writer.append(record)
    writer.close()
    return segment_files(folder)


def test_reads_back_what_was_written_over_several_segments(tmp_path):
    records = some_records(200)
    files = written(tmp_path, records, segment_bytes=500)
    assert len(files) > 3
    assert list(scan(tmp_path)) == records


def test_a_reopened_journal_goes_on(tmp_path):
    records = some_records(20)
    written(tmp_path, records[:9])
    again = SegmentWriter(tmp_path)
    assert again.records == records[:9] and again.torn_bytes == 0
    for record in records[9:]:
        again.append(record)
    again.close()
    assert list(scan(tmp_path)) == records


def test_every_truncation_yields_a_whole_prefix_and_writing_goes_on(tmp_path):
    records = some_records(12)
    (path,) = written(tmp_path / "whole", records)
    whole = path.read_bytes()
    for length in range(len(whole)):
        folder = tmp_path / f"cut{length}"
        folder.mkdir()
        (folder / path.name).write_bytes(whole[:length])
        found = list(scan(folder))
        assert found == records[: len(found)]
        writer = SegmentWriter(folder)
        assert writer.records == found
        writer.append(records[len(found)])
        writer.close()
        assert list(scan(folder)) == records[: len(found) + 1]


def test_every_flipped_byte_yields_a_prefix_or_a_loud_error(tmp_path):
    records = some_records(10)
    (path,) = written(tmp_path / "whole", records)
    whole = path.read_bytes()
    loud = 0
    for position in range(len(whole)):
        for flip in (0x01, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            folder = tmp_path / f"flip{position}-{flip}"
            folder.mkdir()
            (folder / path.name).write_bytes(bytes(damaged))
            try:
                found = list(scan(folder))
            except (JournalCorrupt, RunVersionMismatch):
                loud += 1
            else:
                assert found == records[: len(found)]
                # only damage in the very last record may pass for a torn tail
                assert len(found) >= len(records) - 1 or position in (6, 7)
    assert loud > len(whole)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_damage_never_yields_a_wrong_record(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    records = some_records(15)
    (path,) = written(folder, records)
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=40))
    content[start : start + len(patch)] = patch
    path.write_bytes(bytes(content))
    try:
        found = list(scan(folder))
    except (JournalCorrupt, RunVersionMismatch):
        return
    assert found == records[: len(found)]


def test_a_swapped_or_repeated_frame_is_seen(tmp_path):
    (path,) = written(tmp_path, some_records(4))
    content = path.read_bytes()
    first = SEGMENT_HEADER.size
    length = FRAME_HEADER.unpack_from(content, first)[0] + FRAME_HEADER.size
    frame = content[first : first + length]
    path.write_bytes(content[:first] + frame + content[first:])
    with pytest.raises(JournalCorrupt, match="record 1"):
        list(scan(tmp_path))


def test_a_missing_segment_is_seen(tmp_path):
    files = written(tmp_path, some_records(60), segment_bytes=300)
    files[1].unlink()
    with pytest.raises(JournalCorrupt, match="must follow"):
        list(scan(tmp_path))


def test_a_torn_tail_in_an_older_segment_is_damage(tmp_path):
    files = written(tmp_path, some_records(60), segment_bytes=300)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    with pytest.raises(JournalCorrupt):
        list(scan(tmp_path))


def test_another_format_is_refused(tmp_path):
    (path,) = written(tmp_path, some_records(3))
    content = bytearray(path.read_bytes())
    content[4:6] = (99).to_bytes(2, "little")
    path.write_bytes(bytes(content))
    with pytest.raises(RunVersionMismatch, match="format 99"):
        Journal(tmp_path)


def test_the_torn_tail_is_reported(tmp_path):
    (path,) = written(tmp_path, some_records(5))
    path.write_bytes(path.read_bytes() + b"\x40\x00\x00\x00torn")
    assert SegmentWriter(tmp_path).torn_bytes == 8


def test_a_full_disk_keeps_every_earlier_record(tmp_path, small_disk):
    journal = Journal(small_disk / "journal")
    journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    kept = 0
    with pytest.raises(StorageFull) as caught:
        for number in range(100_000):
            journal.record(r.TokensAppended(rollout="a", call=number, source="observation", ids=[1] * 200))
            kept += 1
    assert "belayer resume" in str(caught.value)
    assert len(journal.history("a").calls) == kept
    assert len(list(scan(small_disk / "journal"))) == kept + 1


def test_history_of_a_truncated_rollout(tmp_path):
    journal = Journal(tmp_path)

    def add(kind, **fields):
        journal.record(kind(rollout="a", **fields))

    add(r.RolloutStarted, group="g", task=None, seed=1)
    add(r.TokensAppended, call=0, source="observation", ids=[1, 2], asked="observe x")
    add(r.ActionIntended, call=1, k=1, g=1, asked="one")
    add(r.ActionCompleted, call=1, k=1, g=1, observed="o1", result={"value": 1})
    add(r.TokensAppended, call=2, source="model", ids=[3], logprobs=[-0.5], weights_version=4, asked="generate")
    add(r.TokensAppended, call=2, source="model", ids=[5], logprobs=[-0.1], weights_version=5, finish="stop")
    before = journal.history("a").context_hash(1)
    add(r.CheckpointPublished, k=1, g=1, id="c1", level="full", context_hash=before)
    add(r.ActionIntended, call=3, k=2, g=1, asked="two")
    add(r.ActionCompleted, call=3, k=2, g=1, observed="o2", result={"value": 2})
    add(r.CheckpointPublished, k=2, g=1, id="c2", level="full", context_hash=journal.history("a").context_hash(2))
    history = journal.history("a")
    assert history.context() == [1, 2, 3, 5]
    assert history.calls[2].versions == [4, 5]
    add(r.ContextTruncated, call=2, k=2, position=2, reason="test")
    assert history.context() == [1, 2]
    assert [c.id for c in history.checkpoints] == ["c1"]
    assert history.context_hash(1) == before
    # the same journal, read again, says the same
    journal.close()
    assert Journal(tmp_path).history("a").context() == [1, 2]


def test_a_voided_turn_is_gone_and_only_an_unfinished_one_can_be(tmp_path):
    journal = Journal(tmp_path)
    journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    journal.record(r.TokensAppended(rollout="a", call=0, source="observation", ids=[1]))
    for version, finish in ((4, ""), (5, "stop")):
        journal.record(
            r.TokensAppended(
                rollout="a",
                call=1,
                source="model",
                ids=[version],
                logprobs=[0.0],
                weights_version=version,
                finish=finish,
            )
        )
        if not finish:
            journal.record(r.TurnVoided(rollout="a", call=1, reason="new weights"))
            assert journal.history("a").context() == [1]
    assert journal.history("a").context() == [1, 5]
    for call in (0, 1, 2):  # an observation, a finished turn, none at all
        with pytest.raises(JournalCorrupt, match="is no unfinished turn"):
            journal.record(r.TurnVoided(rollout="a", call=call, reason="new weights"))


def test_a_completion_without_its_intent_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
    journal.record(r.ActionIntended(rollout="a", call=0, k=1, g=1, asked="one"))
    done = r.ActionCompleted(rollout="a", call=0, k=1, g=1, observed="o", result=None)
    journal.record(done)
    with pytest.raises(JournalCorrupt, match="out of order"):
        journal.record(done)


def test_comparison_counts_every_differing_token(tmp_path):
    for name, ids, reward in (("one", [1, 2, 3], 1.0), ("two", [1, 9, 3, 4], 0.5)):
        journal = Journal(tmp_path / name / "journal")
        journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
        journal.record(r.TokensAppended(rollout="a", call=0, source="model", ids=ids, logprobs=[0.0] * len(ids)))
        journal.record(r.RolloutFinished(rollout="a", reward=reward))
        journal.close()
    found = compare_runs(tmp_path / "one", tmp_path / "two")
    assert (found.tokens_compared, found.tokens_changed, found.rewards_changed) == (4, 2, 1)
    assert not found.same and found.first_difference.startswith("a: call 0")
    assert compare_runs(tmp_path / "one", tmp_path / "one").same
