"""SWE-ReX on a protected sandbox: `python examples/swe_rex.py`, as root, where it is installed."""

import asyncio

from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest, ReadFileRequest, WriteFileRequest

from belayer.integrations.swerex import BelayerDeployment


async def main():
    deployment = BelayerDeployment()
    await deployment.start()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest())
    await runtime.write_file(WriteFileRequest(path="/srv/counter.sh", content="count=$((count+1)); echo $count\n"))
    await runtime.run_in_session(BashAction(command="cd /srv && . ./counter.sh"))
    await runtime.run_in_session(BashAction(command="touch begun-swerex; sleep 1; . ./counter.sh", timeout=30))
    seen = await runtime.run_in_session(BashAction(command=". ./counter.sh; pwd"))  # in the same shell, whatever died
    print(seen.output.split(), (await runtime.read_file(ReadFileRequest(path="/srv/counter.sh"))).content.strip())
    print((await runtime.execute(Command(command=["ls", "/srv"]))).stdout.split())
    await deployment.stop()


asyncio.run(main())
