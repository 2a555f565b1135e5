"""mini-swe-agent in a protected sandbox: `python examples/mini_swe_agent.py`, as root, where it is installed."""

from minisweagent.agents.default import DefaultAgent
from minisweagent.models.test_models import DeterministicModel, make_output

from belayer.integrations.minisweagent import BelayerEnvironment

COMMANDS = [  # what a model would write; here it is given, so that no model is needed
    "mkdir -p /task && echo begun >> /task/attempts-mini",
    "cd /task && sleep 1 && seq 1 4 > numbers && echo added $(paste -sd+ numbers)",
    "cat /task/attempts-mini",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && python3 -c 'print(sum(map(int, open(\"/task/numbers\"))))'",
]
environment = BelayerEnvironment(cwd="/")
model = DeterministicModel(outputs=[make_output("", [{"command": command}]) for command in COMMANDS])
agent = DefaultAgent(model, environment, system_template="Use the shell.", instance_template="{{task}}", cost_limit=0)
result = agent.run("Add the numbers from 1 to 4.")
print(result["exit_status"], result["submission"].strip())
print([message["content"] for message in agent.messages if "<output>" in str(message["content"])][2])
environment.cleanup(reward=float(result["submission"].strip() == "10"))
