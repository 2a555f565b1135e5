"""`GRPOTrainer` with protected rollouts: `.venv/bin/python examples/trl_rollouts.py`, as root."""

from pathlib import Path

from datasets import Dataset

from belayer import Config
from belayer.integrations.trl import ProtectedRollouts, load_grpo, rollout_reward
from tiny_model import build  # a tiny untrained model; any model folder of yours will do


async def solve(rollout):
    await rollout.sandbox.shell(f"cd /tmp && echo {rollout.task} > note-trl && sleep 0.3")
    await rollout.observe(f"{rollout.task}\n$ ")
    turn = await rollout.generate(max_tokens=8)
    seen = await rollout.sandbox.shell("cat note-trl")  # the shell is still in /tmp, whatever died in between
    assert seen.text.strip() == rollout.task, seen
    return float(turn.text.count("e"))


GRPOConfig, GRPOTrainer = load_grpo()
if not Path("runs/tiny_model").exists():
    build(Path("runs/tiny_model"), seed=0)
rollouts = ProtectedRollouts(solve, "runs/trl", Config(engine={"max_model_len": 128}))
trainer = GRPOTrainer(
    model="runs/tiny_model",
    args=GRPOConfig(output_dir="runs/trl-state", max_steps=2, per_device_train_batch_size=4, num_generations=2,
                    use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[]),
    train_dataset=Dataset.from_dict({"prompt": ["red", "blue"]}),
    reward_funcs=rollout_reward,
    rollout_func=rollouts,  # this is all
)  # fmt: skip
print("loss", trainer.train().training_loss)
rollouts.close()
