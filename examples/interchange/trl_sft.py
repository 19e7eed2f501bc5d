"""Fine-tunes a model with TRL on what an agent was rewarded for: the very ids that it sampled, and no others.

steno export runs/RUN --format parquet -o samples.parquet
python examples/interchange/trl_sft.py samples.parquet --model MODEL --output sft
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]


def examples(file: str, min_reward: float) -> Dataset:
    """Rows whose reward is at least `min_reward`, in the columns that TRL takes for tokens already made."""
    rows = load_dataset("parquet", data_files=file, split="train")
    assert isinstance(rows, Dataset)

    def is_kept(reward: float | None, loss_mask: list[int]) -> bool:
        return reward is not None and reward >= min_reward and any(loss_mask)

    kept = rows.filter(is_kept, input_columns=["reward", "loss_mask"])
    names = {"ids": "input_ids", "loss_mask": "assistant_masks"}
    return kept.select_columns(list(names)).rename_columns(names)


def trainer(file: str, model: str, output: str, min_reward: float, max_steps: int) -> SFTTrainer:
    """`max_length` is off: cut rows would no longer be what was sampled. Rows are not packed, for the same reason."""
    settings = SFTConfig(
        output_dir=output,
        max_steps=max_steps,
        max_length=None,
        packing=False,
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        activation_checkpointing=True,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    return SFTTrainer(model, settings, train_dataset=examples(file, min_reward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", required=True, help="a folder or a hub name: the model that sampled the ids")
    parser.add_argument("--output", default="sft")
    parser.add_argument("--min-reward", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, default=100)
    given = parser.parse_args()
    training = trainer(given.file, given.model, given.output, given.min_reward, given.max_steps)
    training.train()
    training.save_model()


if __name__ == "__main__":
    main()
