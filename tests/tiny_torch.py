"""A tiny model of transformers, and what it answers greedily."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["[U]", "<s>", "</s>", "user", "assistant", "system", ":"]
WORDS += [f"w{index}" for index in range(33)]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant : {% endif %}"
)


def make_model(seed=25):
    """A random Llama; with this seed its greedy answers differ, and some end by themselves."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[U]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", bos_token="<s>", chat_template=TEMPLATE
    )


def greedy(model, tokens, count, ends):
    """The obvious loop: the whole sequence through the model for every token."""
    answer = []
    while len(answer) < count and (not answer or answer[-1] not in ends):
        with torch.no_grad():
            logits = model(torch.tensor([tokens + answer])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer
