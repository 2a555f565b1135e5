"""Commands that run something: train, resume, prepare, serve, doctor, uninstall, policy, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from belayer.cli._root import app


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
    config: Annotated[Path | None, Parameter(help="A TOML file, as for `belayer train`.")] = None,
    /,
    *,
    model: Annotated[Path | None, Parameter(help="A model folder, instead of engine.model or a file.")] = None,
    max_model_len: Annotated[int | None, Parameter(help="Instead of engine.max_model_len.")] = None,
    max_num_seqs: Annotated[int | None, Parameter(help="Instead of engine.max_num_seqs.")] = None,
    kv_bytes: Annotated[int | None, Parameter(help="Instead of engine.kv_bytes.")] = None,
    dtype: Annotated[str | None, Parameter(help="Instead of engine.dtype.")] = None,
    threads: Annotated[int | None, Parameter(help="Instead of engine.threads.")] = None,
    batch_invariant: Annotated[bool | None, Parameter(help="Instead of engine.batch_invariant.")] = None,
    adopt_sealed_blocks: Annotated[bool | None, Parameter(help="Instead of engine.adopt_sealed_blocks.")] = None,
) -> int:
    """Make beforehand what the first run with a configuration would make: sandbox image, model, engine image.

    Useful where a job's first minute is dear, and in the image of a machine. Safe to call again: it only checks then.
    An engine image is one for these settings: give those that the run will have.

    Example: `belayer prepare --model runs/tiny_model --max-model-len 256`
    """
    from belayer.cli.prepare import prepare_command

    settings = {
        "model": model,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_bytes": kv_bytes,
        "dtype": dtype,
        "threads": threads,
        "batch_invariant": batch_invariant,
        "adopt_sealed_blocks": adopt_sealed_blocks,
    }
    return prepare_command(config, {f"engine.{name}": value for name, value in settings.items()})


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
    max_body: Annotated[int, Parameter(help="Bytes of a request's body; a larger one is refused (413).")] = 8 << 20,
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
            max_body_bytes=max_body,
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
def uninstall() -> int:
    """Let go of everything that dead runs left and unmount the sandbox stores; print how to delete what is left.

    Deletes nothing from the disk, and refuses while a run is alive.
    """
    from belayer.cli.uninstall import uninstall_command

    return uninstall_command()


@app.command
def settings(*, json: Annotated[bool, Parameter(negative="", help="As a JSON schema.")] = False) -> int:
    """Print every setting with its meaning and its default, as a TOML file that can be used.

    Example: `belayer settings > mine.toml`
    """
    from belayer.cli.settings import settings_command

    return settings_command(as_json=json)


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
