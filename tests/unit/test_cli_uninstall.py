"""What `belayer uninstall` and `doctor --reap` say. That reaping removes only what is dead has tests elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer.cli import doctor, uninstall
from belayer.cli.uninstall import uninstall_command
from belayer.ownership.reap import Leftover
from belayer.sandbox import Capability

pytestmark = pytest.mark.unit


@pytest.fixture
def calm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without runs, on which nothing is really touched; the cache folder is in `tmp_path`."""
    monkeypatch.setenv("BELAYER_CACHE", str(tmp_path / "my cache"))
    monkeypatch.delenv("BELAYER_STORE", raising=False)
    monkeypatch.setattr(uninstall, "live_labels", set)
    monkeypatch.setattr(uninstall, "reap", lambda: ([Leftover("bly-1", "mount", "/run/belayer/bly-1/m")], []))
    monkeypatch.setattr(uninstall, "reap_sandboxes", lambda: ["/run/belayer/store-12345678/mnt"])
    monkeypatch.setattr(uninstall, "mounts_below", lambda folder: [])
    (tmp_path / "my cache" / "store").mkdir(parents=True)
    (tmp_path / "my cache" / "debian-packages").write_text("gcc\nmake\ngcc\n")
    return tmp_path


def test_what_is_left_is_told_and_not_deleted(calm: Path, capsys: pytest.CaptureFixture[str]):
    assert uninstall_command() == 0
    said = capsys.readouterr().out
    assert "removed: mount /run/belayer/bly-1/m" in said and "removed: /run/belayer/store-12345678/mnt" in said
    assert f"rm -rf '{calm}/my cache'" in said and "apt-get remove gcc make " in said
    assert (calm / "my cache" / "store").is_dir()


def test_a_store_elsewhere_is_named_too(calm: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    (calm / "store").mkdir()
    monkeypatch.setenv("BELAYER_STORE", str(calm / "store"))
    assert uninstall_command() == 0
    assert f"rm -rf {calm}/store " in capsys.readouterr().out


def test_living_runs_are_left_alone(calm: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(uninstall, "live_labels", lambda: {"bly-2"})
    monkeypatch.setattr(uninstall, "reap", lambda: pytest.fail("it reaped"))
    assert uninstall_command() == 1
    assert "bly-2" in capsys.readouterr().out


def test_what_is_still_mounted_is_said(calm: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(uninstall, "mounts_below", lambda folder: ["/run/belayer/store-1/mnt"])
    assert uninstall_command() == 1
    said = capsys.readouterr().out
    assert "still mounted: /run/belayer/store-1/mnt" in said and "rm -rf" not in said


def test_the_doctor_cuts_nothing_off_in_a_pipe(monkeypatch, capsys: pytest.CaptureFixture[str]):
    path = "/a/long/path" * 20
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(doctor, "probe", lambda: [Capability("sandbox store", True, path, "")])
    monkeypatch.setattr(doctor, "leftovers", lambda: [])
    doctor.doctor_command(as_json=False, reap_now=False)
    said = capsys.readouterr().out
    assert path in said and "cache folder: " in said and "…" not in said


def test_what_was_removed_is_called_that(capsys: pytest.CaptureFixture[str]):
    stays = "/dev/shm/belayer/x stays, its images cannot be moved to /y: no room"
    doctor.print_reaped(
        [], ["quota groups of 3 deleted subvolumes", stays], [(Leftover("bly-1", "mount", "/m"), "busy")]
    )
    said = capsys.readouterr().out
    assert (
        "removed: quota groups" in said
        and f"kept: {stays}" in said
        and "not removed: mount /m (run bly-1): busy" in said
    )
