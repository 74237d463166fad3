# on request: transformers, torch
from transformers import BertConfig, BertModel
import torch

model = BertModel(
    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
)
print(tuple(model(torch.ones(1, 4, dtype=torch.long)).last_hidden_state.shape))
