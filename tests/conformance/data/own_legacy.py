"""A model as checkpoints bring it: one class that does everything itself, with a cache that is a tuple of tuples."""

import math

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OwnConfig(PretrainedConfig):
    model_type = "own_legacy"

    def __init__(self, vocab_size=320, width=32, heads=4, depth=2, max_position_embeddings=256, **kwargs):
        self.vocab_size = vocab_size
        self.width = width
        self.heads = heads
        self.depth = depth
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.mixed = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, 2 * config.width)
        self.down = nn.Linear(2 * config.width, config.width)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x, past):
        q, k, v = (
            part.view(1, x.shape[1], self.heads, -1).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, -1)
        )
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        behind = torch.arange(k.shape[2]) - torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        scores = (scores + 0.3 * behind).masked_fill(behind > 0, -torch.inf)  # ALiBi
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x))), (k, v)


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(OwnBlock(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, past_key_values=None, use_cache=True, return_dict=True, **kwargs):
        x, present = self.table(input_ids), []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, None if past_key_values is None else past_key_values[number])
            present.append(kept)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=tuple(present) if use_cache else None)
