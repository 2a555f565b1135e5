"""`GRPOTrainer` with its tools in protected sandboxes: `.venv/bin/python examples/trl_environment.py MODEL`, as root.

MODEL is a folder or name of a model that calls tools. The trainer generates; only the environments are protected.
"""

import sys

from datasets import Dataset

from belayer.integrations.trl import SandboxEnvironment, load_grpo

COLOURS = ["red", "blue"]


class Notes(SandboxEnvironment):  # it has the tool `bash`
    def _prepare(self, row):
        self._colour = row["colour"]
        self._sandbox.shell("mkdir /notes && cd /notes")

    def get_reward(self):
        return float(self._sandbox.shell("cat /notes/note-tools").text.strip() == self._colour)


GRPOConfig, GRPOTrainer = load_grpo()
trainer = GRPOTrainer(
    model=sys.argv[1],
    args=GRPOConfig(output_dir="runs/trl-state", max_steps=2, per_device_train_batch_size=6, num_generations=3,
                    max_completion_length=256, logging_steps=1, use_cpu=True, bf16=False,
                    gradient_checkpointing=False, save_strategy="no", report_to=[]),
    train_dataset=Dataset.from_dict({
        "prompt": [[{"role": "user", "content": f"Write {colour} into the file note-tools."}] for colour in COLOURS],
        "colour": COLOURS,
    }),
    environment_factory=Notes,  # this is all
)  # fmt: skip
print("loss", trainer.train().training_loss)
