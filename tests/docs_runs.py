"""Which test runs each command of README and documentation. Every one is in exactly one of the three tables.

`HERE` is run by `tests/integration/test_docs_commands.py` itself: as it stands where that is cheap, and made small by
an option where it is not. `ELSEWHERE` names the test that runs it. `NOT_RUN` is the rest, with the reason; its length
is checked, so that it does not grow unnoticed.

Run as a program, this reads command lines from standard input, carries them out one after another in one process (most
of their time is imports), and prints a JSON line for each: exit code, output, seconds.
"""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

# command as written -> (what is typed here, what it must say). The folder is that of the quick start, with the runs
# runs/mine (its example) and runs/trained (`belayer train` with a small configuration and faults).
HERE: dict[str, tuple[str, str]] = {
    "belayer doctor": ("doctor", "What this machine can do"),
    "belayer doctor --reap": ("doctor --reap", "What this machine can do"),
    "belayer settings": ("settings", "[engine]"),
    "belayer serve --help": ("serve --help", "--upstream"),
    "belayer COMMAND --help": ("status --help", "--watch"),
    "belayer image list": ("image list", "base"),
    "belayer metrics dashboard": ("metrics dashboard", '"title": "Belayer"'),
    # with the engine image that this makes, or that an earlier test has made, the two starts of the next take seconds
    "belayer prepare CONFIG": ("prepare small.toml", "engine image"),
    "belayer train examples/shell_grpo.toml --inject": (
        "train small.toml --inject --reference --plain --run-dir runs/trained",
        "identical",
    ),
    "belayer resume RUN": ("resume runs/trained --plain", ""),
    "belayer show runs/mine": ("show runs/mine", "4 rollouts: 4 delivered"),
    "belayer show runs/mine r-0-0": ("show runs/mine r-0-0", "rollout r-0-0: delivered"),
    "belayer show RUN": ("show runs/trained", "6 rollouts: 6 delivered"),
    "belayer show RUN [ROLLOUT]": ("show runs/trained s0000-0-0", "rollout s0000-0-0: delivered"),
    "belayer show RUN ROLLOUT": ("show runs/trained s0000-0-1", "rollout s0000-0-1: delivered"),
    "belayer verify runs/mine": ("verify runs/mine", "consistent: every context describes"),
    "belayer verify RUN": ("verify runs/trained", "consistent: every context describes"),
    "belayer verify RUN --replay 20": ("verify runs/trained --replay 20", "0 differences"),
    "belayer compare RUN REF": ("compare runs/mine runs/mine", "4 of 4 rollouts identical"),
    "belayer compare RUN REFERENCE": ("compare runs/trained runs/trained/reference", "6 of 6 rollouts identical"),
    "belayer status runs/mine": ("status runs/mine", "finished"),
    "belayer status RUN": ("status runs/trained", "finished"),
    "belayer status RUN --json": ("status runs/trained --json", '"state":"finished"'),
    "belayer status RUN --watch": ("status runs/trained --watch", "finished"),
    "belayer report RUN": ("report runs/trained", "report.html"),
    "belayer timeline RUN": ("timeline runs/trained", "timeline"),
    "belayer policy RUN": ("policy runs/mine", "adaptive (as configured)"),
    "belayer policy RUN NAME": ("policy runs/mine paper", "paper (chosen by"),
    "belayer policy RUN every-n --every 4": ("policy runs/mine every-n --every 4", "every-4 (chosen by"),
    "belayer policy RUN --reset": ("policy runs/mine --reset", "adaptive (as configured)"),
    "belayer checkpoint list runs/one": ("checkpoint list runs/mine", "0 checkpoints"),
    "belayer bench calibration --run RUN": ("bench calibration --run runs/trained", "all checks passed"),
    "belayer bench policy": ("bench policy --quick", "all checks passed"),
    "belayer bench overhead --turns waits": (
        "bench overhead --turns waits --quick --scale 0.01",
        "all checks passed",
    ),
    "belayer bench calibration": ("bench calibration --quick", "all checks passed"),
    "belayer bench faults --sandbox": ("bench faults --sandbox --quick --faults 2", "all checks passed"),
    "belayer bench e2e": ("bench e2e --quick --scale 0.01", "all checks passed"),
}

# command as written -> (file::test, what in that test shows that it is this command)
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "python examples/tiny_model.py runs/tiny_model": (
        "tests/integration/test_docs_commands.py::finished",
        ("examples/tiny_model.py", '"runs/tiny_model"'),
    ),
    "python examples/own_environment.py": (
        "tests/integration/test_docs_commands.py::finished",
        ("examples/own_environment.py",),
    ),
    "belayer prepare --model FOLDER": (
        "tests/unit/test_cli_prepare.py::test_an_image_for_what_the_program_will_ask_for",
        ('"prepare", "--model"',),
    ),
    "belayer prepare --model runs/tiny_model --max-model-len 256": (
        "tests/unit/test_cli_prepare.py::test_an_image_for_what_the_program_will_ask_for",
        ('"prepare", "--model", "runs/tiny_model", "--max-model-len", "256"',),
    ),
    "belayer uninstall": (
        "tests/unit/test_cli_uninstall.py::test_what_is_left_is_told_and_not_deleted",
        ("uninstall_command()",),
    ),
    "make docs": ("tests/integration/test_docs_site.py::site", ("[BUILD, place]",)),
    "belayer serve runs/tiny_model --max-model-len 512": (
        "tests/contract/test_gateway_process.py::test_a_killed_gateway_goes_on_where_it_was",
        ("Cli(run, *arguments)", '"--max-model-len", "512"'),
    ),
    "belayer serve MODEL": (
        "tests/contract/test_gateway_process.py::test_a_killed_gateway_goes_on_where_it_was",
        ("Cli(run, *arguments)", "str(model)"),
    ),
    "belayer serve --upstream http://10.0.0.1:8000 --upstream sglang+http://10.0.0.2:30000 --tokenizer MODEL_FOLDER": (
        "tests/contract/test_gateway_process.py::test_from_outside_a_token_is_needed",
        ('"serve", "--upstream"',),
    ),
    "belayer train CONFIG --metrics-port 9400": (
        "tests/crash/test_train_job.py::test_killed_stopped_resumed_with_faults_equals_the_calm_run",
        ('"--metrics-port", "0"',),
    ),
    "belayer image import NAME SOURCE": (
        "tests/integration/test_sandbox_images.py::test_the_command_line",
        ('"image", "import"',),
    ),
    "belayer image import mine /srv/rootfs": (
        "tests/integration/test_sandbox_images.py::test_every_form_of_an_image_is_the_same_image",
        ('"t-folder"',),
    ),
    "belayer image import tools tools.tar": (
        "tests/integration/test_sandbox_images.py::test_every_form_of_an_image_is_the_same_image",
        ('"t-archive"',),
    ),
    "belayer image import tools layout/ --ref tools:2": (
        "tests/integration/test_sandbox_images.py::test_every_form_of_an_image_is_the_same_image",
        ('"t-layout"', "ref="),
    ),
    "belayer image remove tools": (
        "tests/integration/test_sandbox_images.py::test_the_command_line",
        ('"image", "remove"',),
    ),
    "belayer checkpoint export RUN ID FILE": (
        "tests/integration/test_checkpoint_transfer.py::test_the_command_line",
        ('belayer("export"',),
    ),
    "belayer checkpoint export runs/one r-0-1.0-g1-12-4f00aa one.tar": (
        "tests/integration/test_checkpoint_transfer.py::test_the_command_line",
        ('belayer("export"',),
    ),
    "belayer checkpoint import one.tar runs/two": (
        "tests/integration/test_checkpoint_transfer.py::test_the_command_line",
        ('belayer("import"',),
    ),
    "belayer bench faults --engine": (
        "tests/crash/test_engine_campaign.py::test_a_short_campaign_finds_nothing_wrong_and_can_go_on",
        ("from benchmarks import faults", "carry_out"),
    ),
    "belayer bench env": ("tests/integration/test_bench_env.py::test_one_round_and_what_it_would_notice", ("Cell(",)),
    "belayer bench env --quick": (
        "tests/integration/test_bench_env.py::test_one_round_and_what_it_would_notice",
        ("Cell(",),
    ),
}

_MINUTES = "an engine or sandboxes for a minute and more, also when it is made small; its parts have tests of their own"
NOT_RUN: dict[str, str] = {
    "make setup": "it installs packages; whoever runs the tests has run it",
    "make test": "it runs these tests",
    "make run": "minutes; `belayer train` above is what it runs, with a smaller configuration",
    "belayer image import py docker:python:3.12": "it needs docker and a registry; podman's store has a test",
    "python -m pytest tests/integration/sandbox_conformance": "it is a part of these tests, and runs with them",
    "belayer bench NAME": "NAME stands for the benchmarks below",
    "belayer bench worker": _MINUTES,
    "belayer bench overhead": _MINUTES,
    "belayer bench overhead --engine": _MINUTES,
    "belayer bench overhead --turns inference": _MINUTES,
    "belayer bench overhead --turns step": _MINUTES,
    "belayer bench e2e --train": _MINUTES,
    "belayer bench gateway": _MINUTES,
    "belayer bench faults": _MINUTES,
}


def main() -> None:
    from belayer.cli.app import app

    for line in sys.stdin:
        out, began = io.StringIO(), time.monotonic()
        with redirect_stdout(out), redirect_stderr(out):
            try:
                code = app(line.split(), exit_on_error=False, print_error=True)
            except SystemExit as error:
                code = error.code
            except Exception as error:
                code = f"{type(error).__name__}: {error}"
        told = {"line": line.strip(), "code": code, "out": out.getvalue(), "seconds": time.monotonic() - began}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
