"""One Harbor trial in a protected sandbox: `python examples/harbor_trial.py`, as root, where Harbor is installed."""

import asyncio
from pathlib import Path

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial


async def main():
    config = TrialConfig(
        task=TaskConfig(path=Path(__file__).parent / "harbor_task"),
        trials_dir=Path("runs/harbor-trials"),
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig(import_path="belayer.integrations.harbor:BelayerEnvironment"),
    )
    trial = await Trial.create(config)
    result = await trial.run()
    assert result.exception_info is None, result.exception_info
    print("rewards", result.verifier_result.rewards)


asyncio.run(main())
