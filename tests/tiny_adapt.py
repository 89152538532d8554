"""Small amounts for adapt, and what stops it."""

import tiny_families
from mlx_lm.utils import save_config, save_model
from real import write_tokenizer

from ssmlx.training import (
    sizing,
)
from ssmlx.training.adapt_run import Amounts

LENGTH = 12
AMOUNTS = Amounts(
    answer_tokens=LENGTH,
    question_tokens=6,
    held_out=4,
    checked=2,
    checked_tokens=8,
    timing_seconds=0.0,
)
RATES = sizing.Rates(  # of a machine that makes 26 answers an hour
    answer_tokens_per_second=1.15 * 9 / 60,
    train_seconds_per_token=30 / 9,
    frozen_seconds_per_token=0.0,
    batch_size=4,
    answers_at_once=3,
    memory=2**30,
)


def write_family(folder, name):
    """A random model of mlx-lm's class, in 4 bits, with a tokenizer."""
    own = {**tiny_families.FAMILIES, **tiny_families.CHAINS}[name]
    settings = {**({} if "text_config" in own else tiny_families.SIZES), **own, "model_type": name}
    folder.mkdir()
    save_model(folder, tiny_families.make_base(name, bits=4))
    settings |= {"tie_word_embeddings": True, "eos_token_id": 2}
    save_config({**settings, "quantization": {"group_size": 32, "bits": 4}}, folder / "config.json")
    write_tokenizer(folder)
    return folder


class Stopped(KeyboardInterrupt):
    pass
