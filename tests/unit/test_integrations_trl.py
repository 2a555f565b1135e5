"""The TRL adapter, with the real `GRPOTrainer` on a model of a few thousand parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from belayer.integrations.trl import load_grpo, publish_weights, rollout_func, rollout_reward, to_trl
from belayer.trajectory import Trajectory

pytestmark = pytest.mark.unit
pytest.importorskip("trl", reason="needs the extra `train`")
pytest.importorskip("torch", reason="needs the extra `train`")

PIECES = ["<pad>", "<eos>", *"abcdefgh"]


def rolled(token_ids: list[int], loss_mask: list[int], reward: float = 0.0) -> Trajectory:
    return Trajectory(
        rollout_id="r-0-0",
        group="r-0",
        attempt=0,
        reward=reward,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=[-0.5 * mark for mark in loss_mask],
        weights_versions=[mark - 1 for mark in loss_mask],
        task=None,
        turns=1,
    )


def test_observations_stay_in_the_completion_and_are_masked() -> None:
    made: Any = to_trl([rolled([2, 3, 4, 5, 6], [0, 0, 1, 0, 1], reward=0.25), rolled([2, 7], [0, 1], reward=1.0)])
    assert made == {
        "prompt_ids": [[2, 3], [2]],
        "completion_ids": [[4, 5, 6], [7]],
        "logprobs": [[-0.5, -0.0, -0.5], [-0.5]],
        "env_mask": [[1, 0, 1], [1]],
        "rollout_reward": [0.25, 1.0],
    }


@pytest.mark.parametrize("mask", [[0, 0], [1, 0]])
def test_a_trajectory_without_a_prompt_or_without_the_model_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="rollout r-0-0 holds no prompt or no model token"):
        to_trl([rolled([2, 3], mask)])


def test_a_missing_trajectory_is_not_padded_over() -> None:
    with pytest.raises(ValueError, match="2 trajectories were asked for, and 1 came"):
        rollout_func(lambda prompts, trainer: [rolled([2, 3], [0, 1])])(["a", "a"], None)


def test_the_trainer_learns_what_is_rewarded_and_publishes_after_every_step(tmp_path: Path) -> None:
    """Two answers, one rewarded: it must become likelier, a masked observation must not, and each step is published."""
    import torch
    from datasets import Dataset

    model, tokenizer = _tiny(tmp_path / "model")
    good, bad, seen = 4, 5, 6
    prompt, steps = [2, 3], 6
    asked: list[int] = []
    published: list[tuple[int, dict[str, torch.Tensor]]] = []

    def collect(prompts: list[Any], trainer: Any) -> list[Trajectory]:
        asked.append(trainer.state.global_step)
        assert prompts == [f"step {trainer.state.global_step}"] * 2
        return [rolled([*prompt, token, seen], [0, 0, 1, 0], float(token == good)) for token in (good, bad)]

    def publish(tensors: Any, version: int) -> None:
        published.append((version, {name: tensor.clone() for name, tensor in tensors}))

    def probabilities() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([[*prompt, good]])).logits[0].softmax(-1)

    before = probabilities()
    GRPOConfig, GRPOTrainer = load_grpo()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            per_device_train_batch_size=2,
            num_generations=2,
            shuffle_dataset=False,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"step {step}" for step in range(steps)]}),
        reward_funcs=rollout_reward,
        rollout_func=rollout_func(collect),
        callbacks=[publish_weights(publish)],
    )
    trainer.train()
    after = probabilities()
    assert asked == list(range(steps))
    assert after[1, good] > 2 * before[1, good] and after[1, bad] < before[1, bad]
    assert after[2, seen] < 2 * before[2, seen], "an observation was trained on"
    assert [version for version, _ in published] == list(range(1, steps + 1))
    names = {name for name, _ in model.named_parameters()}
    assert all(set(tensors) == names for _, tensors in published)
    assert all(torch.equal(published[-1][1][name], tensor) for name, tensor in model.named_parameters())
    assert not torch.equal(published[0][1]["lm_head.weight"], published[1][1]["lm_head.weight"])


def test_the_trainer_does_not_bring_the_engine_into_its_process() -> None:
    program = (
        "import sys, json; import belayer.training, belayer.integrations.trl as adapter\n"
        "light = sorted({'torch', 'transformers', 'trl'} & set(sys.modules))\n"
        "adapter.load_grpo(); import trl.import_utils as probes\n"
        "print(json.dumps([light, 'vllm' in sys.modules, probes.is_vllm_available.__name__]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [[], False, "is_vllm_available"]


def _tiny(folder: Path) -> tuple[Any, Any]:
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="a", name_or_path=str(folder)
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(PIECES),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes)), tokenizer
