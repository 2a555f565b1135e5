"""Commands, their help, and how their errors reach the user.

Exit codes: 0 done; 1 something failed, with one error that says what was kept and what to do; 2 the configuration or
the command line cannot be used; 130 stopped by Ctrl-C (the run can be resumed).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from belayer import __version__
from belayer.errors import BelayerError, ConfigError

app = App(
    name="belayer",
    version=__version__,
    help="Fault tolerance for LLM agentic RL training: engine workers and sandboxes die, rollouts go on.",
)
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command
def train(
    config: Annotated[Path, Parameter(help="A TOML file, e.g. examples/shell_grpo.toml.")],
    /,
    *,
    inject: Annotated[bool | None, Parameter(help="Kill and damage workers and sandboxes at seeded moments.")] = None,
    reference: Annotated[
        bool, Parameter(negative="", help="Afterwards run the same seed without faults, and compare every token.")
    ] = False,
    run_dir: Annotated[Path | None, Parameter(help="Where the run goes; default: runs/NAME, numbered.")] = None,
    seed: Annotated[int | None, Parameter(help="Instead of run.seed.")] = None,
    steps: Annotated[int | None, Parameter(help="Instead of train.steps.")] = None,
    plain: Annotated[bool, Parameter(negative="", help="Lines instead of the live view.")] = False,
    metrics_port: Annotated[
        int | None, Parameter(help="Serve Prometheus metrics on this port of 127.0.0.1; 0: any free one.")
    ] = None,
) -> int:
    """Train with RL under protection.

    Ctrl-C stops cleanly; `belayer resume RUN` goes on from there, as it does after a kill -9 or a crash of the host.

    Example: `belayer train examples/shell_grpo.toml --inject --reference`
    """
    from belayer.cli.train import train_command

    return train_command(
        config,
        inject=inject,
        reference=reference,
        run_dir=run_dir,
        seed=seed,
        steps=steps,
        plain=plain,
        metrics_port=metrics_port,
    )


@app.command
def resume(
    run: Annotated[Path, Parameter(help="The folder of a `train` run, e.g. runs/shell_grpo.")],
    /,
    *,
    plain: Annotated[bool, Parameter(negative="", help="Lines instead of the live view.")] = False,
    metrics_port: Annotated[
        int | None, Parameter(help="Serve Prometheus metrics on this port of 127.0.0.1; 0: any free one.")
    ] = None,
) -> int:
    """Finish a `train` run that was stopped, killed or that failed, from its journal.

    Finished rollouts are not run again; unfinished ones get their sandbox back and go on where they were.
    """
    from belayer.cli.train import resume_command

    return resume_command(run, plain=plain, metrics_port=metrics_port)


@app.command
def prepare(
    config: Annotated[Path, Parameter(help="A TOML file, as for `belayer train`.")],
    /,
) -> int:
    """Make beforehand what the first run with a configuration would make: sandbox image, model, engine image.

    Useful where a job's first minute is dear, and in the image of a machine. Safe to call again: it only checks then.
    """
    from belayer.cli.prepare import prepare_command

    return prepare_command(config)


@app.command
def serve(
    model: Annotated[Path | None, Parameter(help="A model folder (config.json, *.safetensors, tokenizer).")] = None,
    /,
    *,
    upstream: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="Instead of a model: a vLLM or SGLang server; several times for several of the same model.",
        ),
    ] = None,
    config: Annotated[Path | None, Parameter(help="A TOML file; [engine] and [run] are used.")] = None,
    run_dir: Annotated[Path, Parameter(help="Where sessions are journalled; start again on it to go on.")] = Path(
        "runs/serve"
    ),
    host: Annotated[str, Parameter(help="Where to listen; outside of loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="0 takes a free one; RUN_DIR/gateway.json says which.")] = 8000,
    token_file: Annotated[
        Path | None, Parameter(help="A file with the bearer token of all clients (or set BELAYER_TOKEN).")
    ] = None,
    name: Annotated[
        list[str] | None, Parameter(negative="", help="What clients call the model; default: its folder's name.")
    ] = None,
    tokenizer: Annotated[Path | None, Parameter(help="With --upstream: a folder with the model's tokenizer.")] = None,
    max_model_len: Annotated[int | None, Parameter(help="Instead of engine.max_model_len.")] = None,
    dtype: Annotated[str | None, Parameter(help="Instead of engine.dtype.")] = None,
    seed: Annotated[int | None, Parameter(help="Instead of run.seed: decides the seeds of sessions.")] = None,
    max_requests: Annotated[int, Parameter(help="Completions at once; more are told to come back (429).")] = 256,
    request_timeout: Annotated[float, Parameter(help="Seconds that one completion may take.")] = 3600.0,
    recover: Annotated[float, Parameter(help="Seconds to wait for an external server when all are away.")] = 60.0,
    drain: Annotated[float, Parameter(help="Seconds that Ctrl-C and SIGTERM wait for completions under way.")] = 10.0,
    sampled_logprobs_only: Annotated[
        bool,
        Parameter(negative="", help="Answer a wish for the likeliest tokens with the sampled one; else it is refused."),
    ] = False,
) -> int:
    """Serve a model over HTTP: clients never notice that an engine worker died.

    Speaks OpenAI's /v1/completions and /v1/chat/completions, vLLM's /inference/v1/generate and SGLang's /generate.
    Requests to /sessions/ID/v1/… (or with the header X-Session-ID: ID) are journalled as one rollout: a retry is
    answered from the journal, also after a kill -9 of this command, and GET /sessions/ID returns what was trained on.

    Example: `belayer serve runs/tiny_model --max-model-len 512`, then point a trainer at http://127.0.0.1:8000/v1
    """
    from belayer.cli.serve import serve_command
    from belayer.gateway.settings import GatewaySettings

    return serve_command(
        model,
        upstream=upstream or [],
        config=config,
        run_dir=run_dir,
        token_file=token_file,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        dtype=dtype,
        seed=seed,
        settings=GatewaySettings(
            host=host,
            port=port,
            names=tuple(name or ()),
            max_requests=max_requests,
            request_timeout_s=request_timeout,
            recover_s=recover,
            drain_s=drain,
            sampled_logprobs_only=sampled_logprobs_only,
        ),
    )


@app.command
def doctor(
    *,
    json: Annotated[bool, Parameter(negative="", help="The same as JSON.")] = False,
    reap: Annotated[bool, Parameter(negative="", help="Remove what dead runs left on this host.")] = False,
) -> int:
    """What this machine can do, the protection that follows, and how to get the next level."""
    from belayer.cli.doctor import doctor_command

    return doctor_command(as_json=json, reap_now=reap)


@app.command
def bench(
    name: str,
    *,
    quick: Annotated[
        bool, Parameter(negative="", help="Fewer samples and workloads; ends within about a minute.")
    ] = False,
    json: Annotated[Path | None, Parameter(help="Write machine, versions and every sample to this file.")] = None,
    engine: Annotated[
        bool | None, Parameter(negative="", help="faults: strike the rollout engine. overhead: measure it alone.")
    ] = None,
    sandbox: Annotated[bool | None, Parameter(negative="", help="faults: kill and restore sandboxes.")] = None,
    faults: Annotated[int | None, Parameter(help="faults: how many; 2,000 (engine 1,000, sandbox 500).")] = None,
    seed: Annotated[int | None, Parameter(help="faults: which ones, and when; default 0.")] = None,
    resume: Annotated[
        bool | None, Parameter(negative="", help="faults: go on with a campaign that was stopped.")
    ] = None,
    run: Annotated[
        Path | None,
        Parameter(help="policy: the turns of this `train` run instead of drawn ones. calibration: the run to look at."),
    ] = None,
    turns: Annotated[
        Literal["waits", "inference"] | None, Parameter(help="overhead: only turns that are waits, or real ones.")
    ] = None,
    scale: Annotated[
        float | None, Parameter(help="overhead, e2e: turns last so much of their published length.")
    ] = None,
    policy: Annotated[
        Literal["adaptive", "always", "never", "every-n", "young-daly", "paper"] | None,
        Parameter(help="overhead: who decides about checkpoints; default adaptive."),
    ] = None,
    train: Annotated[bool | None, Parameter(negative="", help="e2e: train a model instead of replaying turns.")] = None,
    kills: Annotated[int | None, Parameter(help="gateway: kills of the worker; default 100, quick 10.")] = None,
) -> int:
    """Measure recovery against its baselines, or strike with random faults, in one command.

    NAME is `worker`, `env`, `overhead`, `e2e`, `faults`, `gateway`, `policy` (simulated) or `calibration`. Exits
    non-zero when a correctness check inside fails; the figures themselves never fail it.

    Example: `belayer bench faults --engine --quick`
    """
    from belayer.cli.bench import bench_command

    return bench_command(
        name,
        quick=quick,
        json_path=json,
        engine=engine,
        sandbox=sandbox,
        faults=faults,
        seed=seed,
        resume=resume,
        run=run,
        turns=turns,
        scale=scale,
        policy=policy,
        train=train,
        kills=kills,
    )


@app.command
def compare(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    reference: Annotated[Path, Parameter(help="The run to compare with, e.g. runs/shell_grpo/reference.")],
    /,
) -> int:
    """Compare two runs of the same seed, rollout by rollout and token by token."""
    from belayer.cli.inspect import compare_command

    return compare_command(run, reference)


@app.command
def report(
    run: Annotated[Path, Parameter(help="The folder of a `train` run, e.g. runs/shell_grpo.")],
    /,
    *,
    reference: Annotated[Path | None, Parameter(help="A run to compare with.")] = None,
) -> int:
    """Write `report.html` and `trace.json` of a run, from its metrics."""
    from belayer.cli.inspect import report_command

    return report_command(run, reference)


@app.command
def status(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
    *,
    watch: Annotated[bool, Parameter(negative="--once", help="Again every second until the run ends.")] = False,
    json: Annotated[bool, Parameter(negative="", help="As JSON, one line each time.")] = False,
) -> int:
    """How a run is doing: progress, rollouts in flight, engine, sandboxes, faults and recoveries.

    Reads the run's folder and locks nothing, so anybody may ask at any time. Exits with 1 when the driver is gone
    before the run's end (and says how to resume), or when not every rollout was delivered.

    Example: `belayer status runs/shell_grpo --watch`
    """
    from belayer.cli.status import status_command

    return status_command(run, as_json=json, watch=watch)


@app.command
def timeline(
    run: Annotated[Path, Parameter(help="The folder of a `train` run, e.g. runs/shell_grpo.")],
    /,
    *,
    rollout: Annotated[str | None, Parameter(help="Only this rollout; `belayer show RUN` lists them.")] = None,
    output: Annotated[
        Path | None, Parameter(help="Where to; .html makes a page that shows it. Default: trace.json of the run.")
    ] = None,
) -> int:
    """Write a run's timeline for Perfetto or chrome://tracing: turns, actions, checkpoints, faults, recoveries.

    Example: `belayer timeline runs/shell_grpo --output timeline.html`
    """
    from belayer.cli.inspect import timeline_command

    return timeline_command(run, rollout, output)


metrics = App(name="metrics", help="Prometheus metrics of runs; `belayer train --metrics-port` serves them.")
app.command(metrics)


@metrics.command(name="dashboard")
def metrics_dashboard() -> int:
    """Print a Grafana dashboard for them. Example: `belayer metrics dashboard > belayer.json`, then import it."""
    from belayer.cli.inspect import dashboard_command

    return dashboard_command()


@app.command
def show(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    rollout: Annotated[str | None, Parameter(help="An id from the list; without it all are listed.")] = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="", help="The same, and every token, as JSON.")] = False,
) -> int:
    """Print a run's rollouts, or one rollout turn by turn, from the journal.

    Ids of `train` runs are sSTEP-GROUP-MEMBER. restored: times the sandbox was brought back; cut: times the context was
    shortened; try: the attempt, from 0. A rollout is shown with its checkpoints, losses and cuts; [void] marks what was
    cut off and reaches no trainer. Tokens are shown as text where the run's model has a tokenizer.json.
    """
    from belayer.cli.show import show_command

    return show_command(run, rollout, as_json=json)


@app.command
def verify(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
    *,
    replay: Annotated[
        int, Parameter(help="Execute so many finished rollouts again in new sandboxes, and compare what they observe.")
    ] = 0,
    seed: Annotated[int, Parameter(help="Which rollouts --replay draws.")] = 0,
    json: Annotated[bool, Parameter(negative="", help="The same as JSON.")] = False,
) -> int:
    """Check from a run's journal that every trajectory describes what its environment did.

    By other code than that which recovers runs: no action in a state nobody knows, no context that does not fit its
    environment, nothing delivered that was not journalled. A run in progress may be checked. Exits with 1 when a
    promise is broken, or when an action observes something else in a replay (as dates and process ids do).

    Example: `belayer verify runs/shell_grpo --replay 20`
    """
    from belayer.cli.verify import verify_command

    return verify_command(run, replay=replay, seed=seed, as_json=json)


@app.command
def policy(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo; it may be alive.")],
    name: Annotated[str | None, Parameter(help="adaptive, always, never, every-n, young-daly or paper.")] = None,
    /,
    *,
    every: Annotated[int | None, Parameter(help="For every-n: actions between checkpoints.")] = None,
    reset: Annotated[bool, Parameter(negative="", help="Back to the policy of the run's configuration.")] = False,
) -> int:
    """Show which checkpoint policy decides in a run, or let another one decide from now on.

    A living run follows at its next decision, with all that it has learned, and journals the change; `belayer show`
    prints it with every decision's reason.

    Example: `belayer policy runs/shell_grpo every-n --every 4`
    """
    from belayer.cli.policy import policy_command

    return policy_command(run, name, every=every, reset=reset)


checkpoint = App(name="checkpoint", help="List a run's sandbox checkpoints, export one to a file, import one.")
app.command(checkpoint)


@checkpoint.command(name="list")
def checkpoint_list(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
) -> int:
    """List the sandbox checkpoints of a run, oldest first; the run may be alive."""
    from belayer.cli.checkpoint import list_command

    return list_command(run)


@checkpoint.command(name="export")
def checkpoint_export(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    id: Annotated[str, Parameter(help="An id that `belayer checkpoint list` shows.")],
    file: Annotated[Path, Parameter(help="The archive to write; it must not exist yet.")],
    /,
) -> int:
    """Write one checkpoint, with processes and file system, to one file; the run may be alive."""
    from belayer.cli.checkpoint import export_command

    return export_command(run, id, file)


@checkpoint.command(name="import")
def checkpoint_import(
    file: Annotated[Path, Parameter(help="An archive that `belayer checkpoint export` wrote.")],
    run: Annotated[Path, Parameter(help="The run to import into, which must not be alive; made if it is not there.")],
    /,
) -> int:
    """Make the checkpoint in FILE one of RUN, on this host or another of the same kind.

    Import only archives that you trust: what the process images say is restored as root.
    """
    from belayer.cli.checkpoint import import_command

    return import_command(file, run)


image = App(name="image", help="Images of the sandbox store: what new sandboxes start from.")
app.command(image)
_Store = Annotated[Path | None, Parameter(help="Folder of the store; default: below the cache folder.")]


@image.command(name="import")
def image_import(
    name: Annotated[str, Parameter(help="What it will be called, e.g. in sandbox.image.")],
    source: Annotated[str, Parameter(help="A folder, an archive, podman:REFERENCE or docker:REFERENCE.")],
    /,
    *,
    ref: Annotated[str, Parameter(help="Which one, where SOURCE holds several.")] = "",
    store: _Store = None,
) -> int:
    """Unpack an image into the store: from an OCI layout or archive, a docker archive, a root file system, or a store
    of podman or docker.

    Environment and working directory of the image are kept; commands run as root. Example: `belayer image import py
    docker:python:3.12`
    """
    from belayer.cli.image import import_command

    return import_command(name, source, ref=ref, store=store)


@image.command(name="list")
def image_list(
    *, json: Annotated[bool, Parameter(negative="", help="The same as JSON.")] = False, store: _Store = None
) -> int:
    """The images there are."""
    from belayer.cli.image import list_command

    return list_command(as_json=json, store=store)


@image.command(name="remove")
def image_remove(name: str, /, *, store: _Store = None) -> int:
    """Remove an image. Sandboxes and checkpoints that were made from it are not touched."""
    from belayer.cli.image import remove_command

    return remove_command(name, store=store)


def main() -> None:
    """Entry point of the `belayer` command."""
    try:
        code = app(exit_on_error=True, print_error=True)
    except ConfigError as error:
        _print_error(error)
        code = 2
    except BelayerError as error:
        _print_error(error)
        code = 1
    except OSError as error:
        _stderr.print(f"[bold red]error:[/] {type(error).__name__}: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: BelayerError) -> None:
    _stderr.print(f"[bold red]error:[/] [bold]{type(error).__name__}[/]")
    _stderr.print(str(error), markup=False)
